#include "comm/collective_call.h"

#include "base/check.h"

namespace zero::comm {

std::string Call::text() const {
  if (op == "all_gather_bytes") return "all_gather_bytes()";
  if (numel == kPartsByRank) return base::join(op, "(", dtype_text(dtype), ", parts of given sizes)");
  return base::join(op, "(", dtype_text(dtype), ", ", numel, numel == 1 ? " element" : " elements",
                    of.empty() ? "" : " of " + of, root >= 0 ? base::join(", root ", root) : "", ")");
}

Call Parts::call(const at::Tensor& in_tensor) const {
  return {"all_to_all", in_tensor.scalar_type(), equal ? in_tensor.numel() : kPartsByRank};
}

std::string parts_differ(const std::string& from, std::int64_t sent, const std::string& to, std::int64_t expected) {
  return base::join("got parts of different sizes: ", from, " sends ", sent, sent == 1 ? " element" : " elements",
                    " to ", to, ", which expects ", expected);
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
