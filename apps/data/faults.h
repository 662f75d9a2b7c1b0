// What is wrong with the records of a task: all of it in one error. Independent of libzero, torch and models.
#pragma once
#include <cstddef>
#include <stdexcept>
#include <string>

namespace data {

class Faults {
 public:
  // where: file and line.
  void add(const std::string& where, const std::string& got, const std::string& expected) {
    if (count_++ < kShown) text_ += "\n  " + where + ": got " + got + ", expected " + expected;
  }
  // Throws std::runtime_error if there are any: the first 20 in words, the others counted.
  void raise_any() const {
    if (count_ == 0) return;
    std::string text = "[records] " + std::to_string(count_) + (count_ == 1 ? " fault" : " faults") + text_;
    if (count_ > kShown) text += "\n  and " + std::to_string(count_ - kShown) + " more";
    throw std::runtime_error(text);
  }

 private:
  static constexpr std::size_t kShown = 20;
  std::size_t count_ = 0;
  std::string text_;
};

}  // namespace data
