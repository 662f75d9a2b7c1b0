// Mirrors a torch.nn.Module for the engine: a tree of names with the same tensors as the Python module. It has no
// forward; the Python module runs, and the engine intercepts operators on these tensors.
#include <torch/csrc/utils/pybind.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <zero/tiled_linear.h>

#include <unordered_map>
#include <unordered_set>

#include "binding.h"
#include "moe.h"

namespace libzero {
namespace {

struct Node : torch::nn::Module {
  void put(const std::string& name, at::Tensor parameter) {
    if (auto* const known = parameters_.find(name))
      *known = std::move(parameter);
    else
      parameters_.insert(name, std::move(parameter));
  }
};

// Of a libzero.MoE.
struct ExpertNode : Node, zero::ExpertLayer {
  explicit ExpertNode(std::shared_ptr<PyMoe> layer) : layer(std::move(layer)) {}
  std::int64_t num_experts() const override { return layer->options.num_experts; }
  int ep_size() const override { return layer->options.ep_size; }
  void bind(std::shared_ptr<zero::Communicator> expert_group) override { layer->group = std::move(expert_group); }

  const std::shared_ptr<PyMoe> layer;
};

// Of a libzero.TiledLinear.
struct TiledNode : Node, zero::TiledLayer {};

// Null for another module. Not by getattr(): a module that wraps another often passes its attributes on.
std::shared_ptr<PyMoe> expert_layer_of(const py::object& module) {
  const auto attributes = module.attr("__dict__").cast<py::dict>();
  if (!attributes.contains("_layer") || !py::isinstance<PyMoe>(attributes["_layer"])) return nullptr;
  return attributes["_layer"].cast<std::shared_ptr<PyMoe>>();
}

struct Mirror {
  const py::module_ nn = py::module_::import("torch.nn");
  const py::object tiled = py::module_::import("libzero.tiling").attr("TiledLinear");
  const py::object is_lazy = py::module_::import("torch.nn.parameter").attr("is_lazy");
  // A module that is registered twice is mirrored once.
  std::unordered_map<PyObject*, std::shared_ptr<torch::nn::Module>> made;

  std::shared_ptr<torch::nn::Module> of(const py::object& module, const std::string& path) {
    if (const auto it = made.find(module.ptr()); it != made.end()) return it->second;
    std::shared_ptr<torch::nn::Module> out;
    if (py::isinstance(module, nn.attr("ModuleList")) || py::isinstance(module, nn.attr("Sequential"))) {
      out = std::make_shared<torch::nn::ModuleListImpl>();
    } else if (auto layer = expert_layer_of(module)) {
      out = std::make_shared<ExpertNode>(std::move(layer));
    } else if (py::isinstance(module, tiled)) {
      out = std::make_shared<TiledNode>();
    } else {
      out = std::make_shared<Node>();
    }
    made.emplace(module.ptr(), out);
    for (const auto& [name, value] : module.attr("_parameters").cast<py::dict>()) {
      if (value.is_none()) continue;
      const auto text = name.cast<std::string>();
      if (is_lazy(value).cast<bool>())
        throw zero::ConfigError("[Engine] parameter " + path + text +
                                " has no shape yet. Hint: run the model once before constructing the Engine.");
      auto tensor = value.cast<at::Tensor>();
      const bool trained = tensor.requires_grad();
      out->register_parameter(text, std::move(tensor), trained);
    }
    for (const auto& [name, value] : module.attr("_buffers").cast<py::dict>())
      if (!value.is_none()) out->register_buffer(name.cast<std::string>(), value.cast<at::Tensor>());
    for (const auto& [name, value] : module.attr("_modules").cast<py::dict>()) {
      if (value.is_none()) continue;
      const auto text = name.cast<std::string>();
      out->register_module(text, of(py::reinterpret_borrow<py::object>(value), path + text + "."));
    }
    return out;
  }
};

}  // namespace

std::shared_ptr<torch::nn::Module> mirror(const py::object& module) {
  Mirror mirror;
  if (!py::isinstance(module, mirror.nn.attr("Module")))
    throw py::type_error("Engine: got a model of type " + py::type::of(module).attr("__name__").cast<std::string>() +
                         ", expected a torch.nn.Module");
  return mirror.of(module, "");
}

void refresh_parameters(torch::nn::Module& mirrored, const py::object& module) {
  std::unordered_set<const c10::TensorImpl*> held;
  for (const auto& item : mirrored.named_parameters()) held.insert(item.value().unsafeGetTensorImpl());
  const py::object named = module.attr("named_parameters")();
  for (const auto item : named) {
    auto [path, tensor] = item.cast<std::pair<std::string, at::Tensor>>();
    if (held.contains(tensor.unsafeGetTensorImpl())) continue;
    auto* owner = &mirrored;
    for (auto dot = path.find('.'); dot != std::string::npos; path.erase(0, dot + 1), dot = path.find('.')) {
      const auto name = path.substr(0, dot);
      const auto children = owner->named_children();
      const auto* const child = children.find(name);
      owner = (child != nullptr ? *child : owner->register_module(name, std::make_shared<Node>())).get();
    }
    if (auto* const node = dynamic_cast<Node*>(owner)) {
      node->put(path, std::move(tensor));
    } else {
      const bool trained = tensor.requires_grad();
      owner->register_parameter(path, std::move(tensor), trained);
    }
  }
}

void refresh_buffers(torch::nn::Module& mirrored, const py::object& module) {
  auto buffers = mirrored.named_buffers();
  const py::object named = module.attr("named_buffers")(py::arg("remove_duplicate") = false);
  for (const auto item : named) {
    const auto [name, tensor] = item.cast<std::pair<std::string, at::Tensor>>();
    auto* const held = buffers.find(name);
    if (held != nullptr && held->unsafeGetTensorImpl() != tensor.unsafeGetTensorImpl()) held->set_data(tensor.detach());
  }
}

}  // namespace libzero
