#include "torch_hooks/divided_parameter.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <c10/util/strides.h>
#include <zero/errors.h>

#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "torch_hooks/interception.h"

namespace zero::torch_hooks {
namespace {

[[noreturn]] void refuse(const std::string& op) {
  throw ConfigError(base::join(op,
                               " needs a parameter that the ranks hold in parts. Hint: with "
                               "deepspeed.zero.GatheredParameters(parameters), with modifier_rank=0 to write."));
}

// transformers pads the bias of a tied head by the difference of its rows and the table's, which is 0 here.
bool may_give_a_divided_one(std::string_view op) {
  return op == "aten::to" || op == "aten::_to_copy" || op == "aten::contiguous" || op == "aten::pad" ||
         op == "aten::constant_pad_nd";
}

class Refusal final : public UseListener {
 public:
  void before_use(const int* /*tags*/, int /*count*/, const char* op) override {
    if (!may_give_a_divided_one(op)) refuse(op);
  }
  void after_use(const int* /*tags*/, int /*count*/) noexcept override {}
  bool before_write(int /*tag*/, const char* /*op*/) override { return true; }  // before_use() follows
};

// Of those that run: a module takes the result as its parameter's data.
class Conversion final : public CallHandler {
 public:
  void handle(OperatorCall& call, const Use* /*uses*/, std::size_t /*count*/) override {
    const auto op = call.name();
    call.run();
    const auto result = call.take();
    if (result.numel() != 0) refuse(op);
    call.finish(divided_parameter(result.sizes(), result.options()));
  }
  void before_kernel(int /*tag*/, const char* /*kernel*/) override {}  // before_use() has refused it
};

}  // namespace

at::Tensor divided_parameter(at::IntArrayRef sizes, at::TensorOptions options) {
  ZERO_CHECK(c10::multiply_integers(sizes) == 0, "a divided parameter has no elements");
  static auto* const refusal = new Refusal;
  static auto* const conversion = new Conversion;
  // One storage of each kind for all, which stays registered: parameters come and go.
  static auto* const storages = new std::map<std::pair<at::ScalarType, std::string>, at::Tensor>;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& holder = (*storages)[{c10::typeMetaToScalarType(options.dtype()), options.device().str()}];
  if (!holder.defined()) holder = at::empty({0}, options);
  auto tensor = at::empty({0}, options);
  tensor.set_(holder.storage(), 0, sizes, c10::contiguous_strides(sizes));
  intercept(tensor, refusal, 0, conversion);
  return tensor;
}

}  // namespace zero::torch_hooks
