#include "comm/collective_call.h"

#include "base/check.h"

namespace zero::comm {

std::string Call::text() const {
  if (op == "all_gather_bytes") return "all_gather_bytes()";
  return base::join(op, "(", dtype_text(dtype), ", ", numel, numel == 1 ? " element" : " elements",
                    of.empty() ? "" : " of " + of, root >= 0 ? base::join(", root ", root) : "", ")");
}

std::string dtype_text(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return "fp32";
    case c10::ScalarType::BFloat16:
      return "bf16";
    case c10::ScalarType::Half:
      return "fp16";
    case c10::ScalarType::Byte:
      return "byte";
    default:
      return c10::toString(dtype);
  }
}

bool summable(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Float || dtype == c10::ScalarType::BFloat16 || dtype == c10::ScalarType::Half;
}

kernels::Dtype sum_dtype(c10::ScalarType dtype) {
  ZERO_CHECK(summable(dtype), "no sums of dtype ", dtype_text(dtype));
  if (dtype == c10::ScalarType::Float) return kernels::Dtype::F32;
  return dtype == c10::ScalarType::Half ? kernels::Dtype::F16 : kernels::Dtype::BF16;
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

std::string duration_text(std::chrono::milliseconds duration) {
  if (duration.count() < 1000) return base::join(duration.count(), " ms");
  return base::join(static_cast<double>(duration.count()) / 1000, " s");
}

std::string at_call(std::string_view op, const std::string& text, int rank, int size, std::uint64_t sequence,
                    const std::string& hint) {
  return base::join("[Communicator::", op, "] ", text, " (rank ", rank, "/", size, ", operation ", sequence, ")",
                    hint.empty() ? "" : ". Hint: ", hint);
}

}  // namespace zero::comm
