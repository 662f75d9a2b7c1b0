// Bindings of Mesh and of the differentiable functions of tensor and sequence parallelism; libzero/mesh.py,
// libzero/tp.py and libzero/sequence.py wrap them.
#include <torch/csrc/utils/pybind.h>
#include <zero/sp.h>
#include <zero/tp.h>

#include <tuple>

#include "binding.h"

namespace libzero {
namespace {

using zero::tp::Lengths;

// A group as a Communicator that keeps the mesh and the run's, which must outlive its groups.
PyCommunicator group_of(const std::shared_ptr<zero::Mesh>& mesh, const std::shared_ptr<zero::Communicator>& group) {
  return PyCommunicator(std::shared_ptr<zero::Communicator>(mesh, group.get()));
}

template <class F>
auto over(const PyCommunicator& group, F&& call) {
  const auto comm = group.get();
  return blocking(comm, [&] { return call(comm); });
}

template <class F>
auto over(const PyMesh& mesh, F&& call) {
  const auto held = mesh.get();
  return blocking(held->world(), [&] { return call(*held); });
}

void bind_mesh(py::module_& module) {
  py::class_<PyMesh> c(module, "Mesh");
  c.def_static(
      "of",
      [](const zero::Options& options, const PyCommunicator& comm) {
        const auto world = comm.get();
        return PyMesh(blocking(world, [&] { return zero::Mesh::of(options, world); }));
      },
      py::arg("options"), py::arg("comm"));
  c.def("size", [](const PyMesh& self, const std::string& dim) { return self.get()->size(dim); });
  c.def("rank", [](const PyMesh& self, const std::string& dim) { return self.get()->rank(dim); });
  c.def("group", [](const PyMesh& self, const std::string& dim) {
    const auto mesh = self.get();
    return group_of(mesh, mesh->group(dim));
  });
  c.def("experts", [](const PyMesh& self, int ep_size) {
    const auto groups = over(self, [&](const zero::Mesh& mesh) { return mesh.experts(ep_size); });
    return std::make_pair(group_of(self.get(), groups.expert), group_of(self.get(), groups.data));
  });
  c.def("world", [](const PyMesh& self) { return PyCommunicator(self.get()->world()); });
  c.def("tokens", [](const PyMesh& self, std::int64_t tokens) { return self.get()->tokens(tokens); });
  c.def("text", [](const PyMesh& self) { return self.get()->text(); });
  c.def("close", [](PyMesh& self) {
    if (self.owned.alive()) self.owned.reset();
  });
}

void bind_mappings(py::module_& module) {
  using Mapping = at::Tensor (*)(const at::Tensor&, const zero::tp::Group&);
  const auto mapping = [&](const char* name, Mapping function) {
    module.def(
        name,
        [function](const at::Tensor& x, const PyCommunicator& group) {
          return over(group, [&](const zero::tp::Group& comm) { return function(x, comm); });
        },
        py::arg("x"), py::arg("group"));
  };
  mapping("tp_copy", &zero::tp::copy);
  mapping("tp_reduce", &zero::tp::reduce);

  using Division = at::Tensor (*)(const at::Tensor&, const zero::tp::Group&, std::int64_t, const Lengths&);
  const auto division = [&](const char* name, Division function) {
    module.def(
        name,
        [function](const at::Tensor& x, const PyCommunicator& group, std::int64_t dim, const Lengths& lengths) {
          return over(group, [&](const zero::tp::Group& comm) { return function(x, comm, dim, lengths); });
        },
        py::arg("x"), py::arg("group"), py::arg("dim"), py::arg("lengths"));
  };
  division("tp_scatter", &zero::tp::scatter);
  division("tp_gather", &zero::tp::gather);
  division("tp_gather_split", &zero::tp::gather_split);
  division("tp_reduce_scatter", &zero::tp::reduce_scatter);
}

void bind_vocabulary(py::module_& module) {
  module.def(
      "tp_vocab_parallel_embedding",
      [](const at::Tensor& weight, const at::Tensor& ids, const PyCommunicator& group, std::int64_t begin,
         std::int64_t vocabulary, std::int64_t padding_idx) {
        return over(group, [&](const zero::tp::Group& comm) {
          return zero::tp::vocab_parallel_embedding(weight, ids, comm, begin, vocabulary, padding_idx);
        });
      },
      py::arg("weight"), py::arg("ids"), py::arg("group"), py::arg("begin"), py::arg("vocabulary"),
      py::arg("padding_idx"));
  module.def(
      "tp_cross_entropy",
      [](const at::Tensor& logits, const at::Tensor& targets, const PyCommunicator& group, std::int64_t ignore_index,
         double label_smoothing, std::int64_t vocabulary) {
        const zero::tp::CrossEntropyOptions options{
            .ignore_index = ignore_index, .label_smoothing = label_smoothing, .vocabulary = vocabulary};
        return over(group, [&](const zero::tp::Group& comm) {
          return zero::tp::cross_entropy(logits, targets, comm, options);
        });
      },
      py::arg("logits"), py::arg("targets"), py::arg("group"), py::arg("ignore_index"), py::arg("label_smoothing"),
      py::arg("vocabulary"));
}

void bind_sequence(py::module_& module) {
  module.def(
      "sequence_to_heads",
      [](const at::Tensor& x, const PyMesh& mesh, std::int64_t tokens) {
        return over(mesh, [&](const zero::Mesh& m) { return zero::sequence_to_heads(x, m, tokens); });
      },
      py::arg("x"), py::arg("mesh"), py::arg("tokens"));
  module.def(
      "attention_to_heads",
      [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const PyMesh& mesh, std::int64_t tokens) {
        const auto all = over(mesh, [&](const zero::Mesh& m) { return zero::sequence_to_heads(q, k, v, m, tokens); });
        return std::tuple(all[0], all[1], all[2]);
      },
      py::arg("q"), py::arg("k"), py::arg("v"), py::arg("mesh"), py::arg("tokens"));
  module.def(
      "heads_to_sequence",
      [](const at::Tensor& x, const PyMesh& mesh, std::int64_t tokens, std::int64_t heads) {
        return over(mesh, [&](const zero::Mesh& m) { return zero::heads_to_sequence(x, m, tokens, heads); });
      },
      py::arg("x"), py::arg("mesh"), py::arg("tokens"), py::arg("heads"));
}

}  // namespace

void bind_parallel(py::module_& module) {
  bind_mesh(module);
  bind_mappings(module);
  bind_vocabulary(module);
  bind_sequence(module);
}

}  // namespace libzero
