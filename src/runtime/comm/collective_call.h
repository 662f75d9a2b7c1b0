// One collective as all ranks must call it: shown in errors, and compared by transports to detect ranks whose calls
// differ. Also has text shared by the messages of all transports. Moves no data.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "kernels/elementwise.h"

namespace zero::comm {

constexpr std::int64_t kPartsByRank = -1;

struct Call {
  std::string op;  // "all_gather", ..., "all_gather_bytes"
  c10::ScalarType dtype = c10::ScalarType::Byte;
  // Of the larger side, which is the total over ranks; kPartsByRank: an all_to_all whose parts differ in size.
  std::int64_t numel = 0;
  int root = -1;        // of a broadcast
  std::string of = {};  // what an all_gather gathers, if given

  bool operator==(const Call&) const = default;
  // "all_gather(bf16, 4096 elements of layers.3)", "broadcast(fp32, 7 elements, root 2)", "all_gather_bytes()".
  std::string text() const;
};

// The parts of an all_to_all in elements: part p of `in` goes to rank p, and part p of `out` comes from it. They lie
// one after another.
struct Parts {
  std::vector<std::int64_t> out, in;
  bool equal = false;  // all of one size, which every rank's call states; otherwise receivers compare with the senders

  Call call(const at::Tensor& in_tensor) const;
};
// "got parts of different sizes: rank 0 sends 3 elements to rank 1, which expects 4".
std::string parts_differ(const std::string& from, std::int64_t sent, const std::string& to, std::int64_t expected);

// "fp32", "bf16", "fp16", "byte", else torch's name.
std::string dtype_text(c10::ScalarType dtype);

// Whether sums of this dtype are supported, and its kernel dtype. sum_dtype requires a summable dtype.
bool summable(c10::ScalarType dtype);
kernels::Dtype sum_dtype(c10::ScalarType dtype);

// "rank 2", "ranks 1, 3, 5".
std::string ranks_text(const std::vector<int>& ranks);
// "1.5 s", "250 ms".
std::string duration_text(std::chrono::milliseconds duration);

// The hint for mismatched calls.
inline constexpr const char* kSameCallsHint =
    "all ranks make the same calls in the same order; at stage 3 forward takes the same way through the model on all";

// "[Communicator::all_gather] TEXT (rank 0/4, operation 17)", and ". Hint: HINT" if there is one.
std::string at_call(std::string_view op, const std::string& text, int rank, int size, std::uint64_t sequence,
                    const std::string& hint = {});

}  // namespace zero::comm
