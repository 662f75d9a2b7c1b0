// Mirrors a torch.nn.Module for the engine: a tree of names with the same tensors as the Python module. It has no
// forward; the Python module runs, and the engine intercepts operators on these tensors.
#include <torch/csrc/utils/pybind.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <zero/tiled_linear.h>
#include <zero/unsaved_buffers.h>

#include <unordered_map>
#include <unordered_set>

#include "binding.h"
#include "moe.h"

namespace libzero {
namespace {

// The dictionary of buffers is private, and libtorch has no way to replace or remove one. An explicit template
// instantiation may legally name a private member.
using Tensors = torch::OrderedDict<std::string, at::Tensor>;
template <auto Member>
struct ReachBuffers {
  friend Tensors& buffers_of(torch::nn::Module& module) { return module.*Member; }
};
Tensors& buffers_of(torch::nn::Module& module);
template struct ReachBuffers<&torch::nn::Module::buffers_>;

// What a program may change of a mirrored module.
struct Place : zero::UnsavedBuffers {
  bool is_unsaved(const std::string& name) const override { return unsaved.contains(name); }
  virtual void put(const std::string& name, at::Tensor parameter) = 0;
  virtual void put_buffer(const std::string& name, at::Tensor buffer) = 0;
  virtual void drop_buffer(const std::string& name) = 0;

  std::unordered_set<std::string> unsaved;  // buffers that are not persistent
};

template <class Module>
struct Mirrored : Module, Place {
  void put(const std::string& name, at::Tensor parameter) override {
    put(this->parameters_, name, std::move(parameter));
  }
  void put_buffer(const std::string& name, at::Tensor buffer) override {
    put(buffers_of(*this), name, std::move(buffer));
  }
  void drop_buffer(const std::string& name) override { buffers_of(*this).erase(name); }

 private:
  static void put(Tensors& held, const std::string& name, at::Tensor tensor) {
    if (auto* const known = held.find(name))
      *known = std::move(tensor);
    else
      held.insert(name, std::move(tensor));
  }
};

using Node = Mirrored<torch::nn::Module>;
using ListNode = Mirrored<torch::nn::ModuleListImpl>;

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

void note_unsaved(torch::nn::Module& mirrored, const py::handle& module) {
  const py::object names = py::getattr(module, "_non_persistent_buffers_set", py::set());
  dynamic_cast<Place&>(mirrored).unsaved = names.cast<std::unordered_set<std::string>>();
}

struct Mirror {
  const py::module_ nn = py::module_::import("torch.nn");
  const py::object tiled = py::module_::import("libzero.tiling").attr("TiledLinear");
  const py::object is_lazy = py::module_::import("torch.nn.parameter").attr("is_lazy");
  // A module that is registered twice is mirrored once.
  std::unordered_map<PyObject*, std::shared_ptr<torch::nn::Module>> made;
  std::unordered_set<PyObject*> open;  // whose children are being mirrored

  std::shared_ptr<torch::nn::Module> of(const py::object& module, const std::string& path) {
    if (const auto it = made.find(module.ptr()); it != made.end()) return it->second;
    std::shared_ptr<torch::nn::Module> out;
    if (py::isinstance(module, nn.attr("ModuleList")) || py::isinstance(module, nn.attr("Sequential"))) {
      out = std::make_shared<ListNode>();
    } else if (auto layer = expert_layer_of(module)) {
      out = std::make_shared<ExpertNode>(std::move(layer));
    } else if (py::isinstance(module, tiled)) {
      out = std::make_shared<TiledNode>();
    } else {
      out = std::make_shared<Node>();
    }
    made.emplace(module.ptr(), out);
    open.insert(module.ptr());
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
    note_unsaved(*out, module);
    for (const auto& [name, value] : module.attr("_modules").cast<py::dict>()) {
      if (value.is_none()) continue;
      const auto text = name.cast<std::string>();
      if (open.contains(value.ptr()))
        throw zero::ConfigError("[Engine] the module " + path + text +
                                " is one that holds it, expected a tree: state_dict(), train() and to() of torch never "
                                "end on it. Hint: keep it as a weakref.ref.");
      out->register_module(text, of(py::reinterpret_borrow<py::object>(value), path + text + "."));
    }
    open.erase(module.ptr());
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

namespace {

// The module of a path, which is made if there is none; the last part of the path is left in it.
torch::nn::Module& owner_of(torch::nn::Module& mirrored, std::string& path) {
  auto* owner = &mirrored;
  for (auto dot = path.find('.'); dot != std::string::npos; path.erase(0, dot + 1), dot = path.find('.')) {
    const auto name = path.substr(0, dot);
    const auto children = owner->named_children();
    const auto* const child = children.find(name);
    owner = (child != nullptr ? *child : owner->register_module(name, std::make_shared<Node>())).get();
  }
  return *owner;
}

Place& place_of(torch::nn::Module& module) { return dynamic_cast<Place&>(module); }

}  // namespace

void refresh_parameters(torch::nn::Module& mirrored, const py::object& module) {
  std::unordered_set<const c10::TensorImpl*> held;
  for (const auto& item : mirrored.named_parameters()) held.insert(item.value().unsafeGetTensorImpl());
  const py::object named = module.attr("named_parameters")();
  for (const auto item : named) {
    auto [path, tensor] = item.cast<std::pair<std::string, at::Tensor>>();
    if (held.contains(tensor.unsafeGetTensorImpl())) continue;
    auto& owner = owner_of(mirrored, path);
    place_of(owner).put(path, std::move(tensor));
  }
}

void refresh_buffers(torch::nn::Module& mirrored, const py::object& module) {
  std::unordered_set<std::string> named;
  const auto held = mirrored.named_buffers();
  // Modules, not buffers: which of theirs are persistent may have changed, too.
  const py::object modules = module.attr("named_modules")(py::arg("remove_duplicate") = false);
  for (const auto item : modules) {
    const auto [path, each] = item.cast<std::pair<std::string, py::object>>();
    const py::dict buffers(each.attr("_buffers"));
    if (buffers.empty()) continue;
    auto inside = path + ".";  // what is left of it is the empty name in the module itself
    auto& owner = path.empty() ? mirrored : owner_of(mirrored, inside);
    note_unsaved(owner, each);
    for (const auto& [key, value] : buffers) {
      if (value.is_none()) continue;
      const auto name = key.cast<std::string>(), full = path.empty() ? name : path + "." + name;
      named.insert(full);
      auto tensor = value.cast<at::Tensor>();
      const auto* const known = held.find(full);
      if (known == nullptr || known->unsafeGetTensorImpl() != tensor.unsafeGetTensorImpl())
        place_of(owner).put_buffer(name, std::move(tensor));
    }
  }
  for (const auto& item : held) {
    if (named.contains(item.key())) continue;
    auto name = item.key();
    auto& owner = owner_of(mirrored, name);
    place_of(owner).drop_buffer(name);
  }
}

}  // namespace libzero
