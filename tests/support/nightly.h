// What a test over many cases leaves to script/nightly.
#pragma once
#include <cstdlib>

namespace zero::test {

// True in the entries NAME_nightly of ctest (cmake/ZeroTests.cmake).
inline bool nightly() { return std::getenv("ZERO_NIGHTLY") != nullptr; }

// Takes each case of a matrix at night, and one of `n` else: the first, the (n+1)th and so on. With an `n` that has no
// factor in common with the lengths of the loops, a long matrix has each value of each axis.
class OneIn {
 public:
  explicit OneIn(int n) : n_(nightly() ? 1 : n) {}
  bool take() { return count_++ % n_ == 0; }

 private:
  int n_, count_ = 0;
};

}  // namespace zero::test
