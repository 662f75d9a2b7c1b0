// Binding of layers with experts; libzero/moe.py wraps it.
#include "moe.h"

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <type_traits>

#include "binding.h"

namespace libzero {
namespace {

template <class T>
constexpr const char* kind_of() {
  if (std::is_same_v<T, bool>) return "True or False";
  if (std::is_integral_v<T>) return "a whole number";
  return std::is_floating_point_v<T> ? "a number" : "a text";
}

std::shared_ptr<PyMoe> layer_of(const py::kwargs& words) {
  auto layer = std::make_shared<PyMoe>();
  auto& o = layer->options;
  const auto take = [&](const char* word, auto& value) {
    using Value = std::remove_reference_t<decltype(value)>;
    const py::object given = words[word];
    try {
      value = given.cast<Value>();
    } catch (const py::cast_error&) {
      throw zero::ConfigError(std::string("[MoE] ") + word + ": got " + py::repr(given).cast<std::string>() +
                              ", expected " + kind_of<Value>() + ".");
    }
  };
  take("hidden_size", o.hidden_size);
  take("num_experts", o.num_experts);
  take("ep_size", o.ep_size);
  take("k", o.k);
  take("capacity_factor", o.capacity_factor);
  take("eval_capacity_factor", o.eval_capacity_factor);
  take("min_capacity", o.min_capacity);
  take("use_residual", o.use_residual);
  take("noisy_gate_policy", o.noisy_gate_policy);
  take("drop_tokens", o.drop_tokens);
  take("use_rts", o.use_rts);
  take("top2_2nd_expert_sampling", o.top2_2nd_expert_sampling);
  take("drop_policy", o.drop_policy);
  take("merged_batches", o.merged_batches);
  o.check();
  return layer;
}

py::tuple mix_experts(const PyMoe& layer, const at::Tensor& x, const at::Tensor& gate, bool training,
                      const py::function& run, const std::optional<at::Tensor>& used_token) {
  const auto group = layer.group;  // kept while this runs
  const auto result = blocking(group, [&] {
    return zero::mix_experts(
        x, gate, layer.options, training, group,
        [&](std::int64_t c, const at::Tensor& rows) {
          py::gil_scoped_acquire gil;
          return run(c, rows).cast<at::Tensor>();
        },
        used_token.value_or(at::Tensor()));
  });
  return py::make_tuple(result.output, result.l_aux, result.exp_counts, result.kept);
}

}  // namespace

void bind_moe(py::module_& module) {
  py::class_<PyMoe, std::shared_ptr<PyMoe>>(module, "MoeLayer")
      .def(py::init(&layer_of))
      .def_property_readonly("place",
                             [](const PyMoe& layer) -> std::optional<int> {
                               if (!layer.group) return std::nullopt;
                               return layer.group->rank();
                             })
      .def("mix_experts", &mix_experts, py::arg("x"), py::arg("gate"), py::arg("training"), py::arg("run"),
           py::arg("used_token"));
  module.def("mix_residual", &zero::mix_residual, py::arg("experts"), py::arg("dense"), py::arg("coefficients"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace libzero
