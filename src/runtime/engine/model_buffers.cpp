// See model_buffers.h.
#include "engine/model_buffers.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <zero/moe.h>
#include <zero/unsaved_buffers.h>

#include <vector>

#include "base/check.h"
#include "base/gathered_values.h"
#include "base/log.h"
#include "base/plain_name.h"
#include "base/printable.h"
#include "engine/checks.h"
#include "engine/dtypes.h"

namespace zero::engine {
namespace {

bool is_dense(const at::Tensor& buffer) { return buffer.layout() == at::kStrided && !buffer.is_nested(); }

bool is_compressed(at::Layout layout) {
  return layout == at::kSparseCsr || layout == at::kSparseCsc || layout == at::kSparseBsr || layout == at::kSparseBsc;
}

// The dense tensors that a sparse one consists of.
std::vector<at::Tensor> members_of(const at::Tensor& sparse) {
  if (sparse.layout() == at::kSparse) return {sparse._indices(), sparse._values()};
  const bool rows = sparse.layout() == at::kSparseCsr || sparse.layout() == at::kSparseBsr;
  return {rows ? sparse.crow_indices() : sparse.ccol_indices(), rows ? sparse.col_indices() : sparse.row_indices(),
          sparse.values()};
}

at::Tensor sparse_of(const std::vector<at::Tensor>& members, const at::Tensor& like) {
  if (like.layout() == at::kSparse)
    return at::_sparse_coo_tensor_unsafe(members[0], members[1], like.sizes(), like.options(), like.is_coalesced());
  return at::_sparse_compressed_tensor_unsafe(members[0], members[1], members[2], like.sizes(), like.options());
}

// Rank 0's values.
void broadcast(comm::Group& comm, const at::Tensor& dense) {
  if (dense.numel() == 0) return;
  auto flat = dense.detach().contiguous().view({-1}).view(at::kByte).clone();
  comm.broadcast(flat, 0)->wait();
  dense.detach().copy_(flat.view(dense.scalar_type()).view(dense.sizes()));
}

// The ranks may have other elements, and other numbers of them.
void broadcast_sparse(comm::Group& comm, at::Tensor& buffer) {
  auto members = members_of(buffer);
  for (auto& member : members) {
    const auto wanted = base::all_gather_lists(comm, member.sizes().vec()).front();
    member = comm.rank() == 0 ? member.contiguous() : at::empty(wanted, member.options());
    broadcast(comm, member);
  }
  const bool coalesced =
      buffer.layout() == at::kSparse && comm.all_gather_bytes(buffer.is_coalesced() ? "1" : "0")[0] == "1";
  if (comm.rank() == 0) return;
  const auto values = sparse_of(members, buffer);
  if (buffer.layout() == at::kSparse) return buffer.set_data(values._coalesced_(coalesced));
  buffer.resize_as_sparse_(values);  // set_data() leaves a compressed tensor its elements
  buffer.copy_(values);
}

// What the Engine cannot broadcast, or "".
std::string fault_of(const at::Tensor& buffer) {
  if (buffer.is_meta()) return "lies on the device meta, expected a tensor with values";
  if (buffer.is_nested()) return "is a nested tensor, expected a dense or a sparse one";
  if (buffer.is_quantized()) return "is quantized, expected a float, integer or bool tensor";
  if (buffer.layout() != at::kStrided && buffer.layout() != at::kSparse && !is_compressed(buffer.layout()))
    return base::join("has the layout ", buffer.layout(), ", expected a dense or a sparse tensor");
  return "";
}

}  // namespace

std::set<std::string> unsaved_buffers(const torch::nn::Module& model) {
  std::set<std::string> names;
  for (const auto& module : model.named_modules()) {
    const auto* const rule = dynamic_cast<const UnsavedBuffers*>(module.value().get());
    if (rule == nullptr) continue;
    for (const auto& buffer : module.value()->named_buffers(/*recurse=*/false))
      if (rule->is_unsaved(buffer.key()))
        names.insert(module.key().empty() ? buffer.key() : module.key() + "." + buffer.key());
  }
  return names;
}

void check_buffers(const torch::nn::Module& model, int ranks) {
  std::string faults;
  for (const auto& item : model.named_buffers()) {
    if (!item.value().defined()) continue;
    if (!base::is_plain_name(item.key(), kMostModelNameBytes)) faults += "\n  buffer " + name_fault(item.key());
    // One rank alone leaves it as it is.
    if (const auto fault = ranks == 1 ? std::string() : fault_of(item.value()); !fault.empty())
      faults += "\n  buffer " + item.key() + ": " + fault;
  }
  // Saves send buffers of divided experts to the other ranks, which have tensors of the same size for them.
  for (const auto& module : model.named_modules()) {
    const auto* const layer = dynamic_cast<const ExpertLayer*>(module.value().get());
    if (layer == nullptr || layer->ep_size() <= 1) continue;
    for (const auto& item : module.value()->named_buffers())
      if (item.value().defined() && item.value().layout() != at::kStrided)
        faults += base::join("\n  buffer ", module.key(), ".", item.key(), ": has the layout ", item.value().layout(),
                             ", expected a dense tensor in experts that are divided over ranks");
  }
  if (!faults.empty()) throw ConfigError("[Engine] the model's buffers cannot be taken:" + faults);
}

void adopt_buffers(const Parts& parts, bool moves) {
  const at::NoGradGuard no_grad;
  auto& comm = *parts.job.comm;
  const auto unsaved = unsaved_buffers(*parts.job.model);
  for (auto& item : parts.job.model->named_buffers()) {
    auto& buffer = item.value();
    if (!buffer.defined()) continue;
    const bool dense = is_dense(buffer);
    if (moves) buffer.set_data(buffer.to(parts.plan.device));
    if (comm.rank() == 0 && !can_be_saved(buffer) && !unsaved.contains(item.key()))
      base::log(LogLevel::Warning,
                base::join("[Engine] buffer ", item.key(), dense ? " has the type " : " is a tensor of ",
                           dense ? std::string(c10::toString(buffer.scalar_type())) : buffer.toString(),
                           ", which checkpoints cannot hold: save_checkpoint will refuse. Hint: use a float, integer "
                           "or bool tensor."));
    if (!dense) {
      if (comm.size() > 1) broadcast_sparse(comm, buffer);
      continue;
    }
    if (buffer.numel() == 0) continue;
    if (parts.job.settings.buffer_dtype && buffer.is_floating_point())
      buffer.set_data(buffer.to(scalar_type(*parts.job.settings.buffer_dtype)));
    if (!buffer.is_contiguous()) buffer.set_data(buffer.contiguous());  // broadcast and saved in memory order
    if (comm.size() > 1) broadcast(comm, buffer);
    parts.memory->ledger->book(step::Tier::Device, step::Purpose::Other, static_cast<std::int64_t>(buffer.nbytes()));
  }
  if (!parts.activations) return;
  std::vector<const void*> resident;
  for (const auto& buffer : parts.job.model->buffers())
    if (buffer.defined() && is_dense(buffer) && buffer.has_storage())
      resident.push_back(buffer.storage().unsafeGetStorageImpl());
  parts.activations->set_resident(resident);
}

bool can_be_saved(const at::Tensor& buffer) { return is_dense(buffer) && can_be_saved(buffer.scalar_type()); }

void require_dense(const at::Tensor& buffer, const std::string& name) {
  if (!is_dense(buffer))
    throw ConfigError("[Engine] buffer " + name + " is a tensor of " + buffer.toString() +
                      ", which checkpoints, exports and imports cannot hold. Hint: use a dense float, integer or bool "
                      "tensor, or register_buffer(persistent=False) if the program makes it.");
}

}  // namespace zero::engine
