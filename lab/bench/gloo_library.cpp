// c10d's process group and its store; see gloo_library.h.
#include "lab/bench/gloo_library.h"

#include <zero/errors.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <string>
#include <vector>

namespace zero::cli {
namespace {

constexpr const char* kHost = "127.0.0.1";

c10::intrusive_ptr<c10d::Store> meet(Communicator& meeting) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = meeting.rank() == 0;
  options.waitWorkers = false;
  options.timeout = meeting.timeout();
  c10::intrusive_ptr<c10d::TCPStore> store;
  if (options.isServer) store = c10::make_intrusive<c10d::TCPStore>(kHost, options);
  const auto ports = meeting.all_gather_bytes(store ? std::to_string(store->getPort()) : "");
  if (store) return store;
  options.port = static_cast<std::uint16_t>(std::stoi(ports.front()));
  return c10::make_intrusive<c10d::TCPStore>(kHost, options);
}

}  // namespace

struct GlooLibrary::State {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
};

GlooLibrary::GlooLibrary(Communicator& meeting) : state_(std::make_unique<State>()) {
  try {
    auto options = c10d::ProcessGroupGloo::Options::create(meeting.timeout());
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(kHost));
    options->threads = 2;  // per device, as torch.distributed sets it
    state_->group = c10::make_intrusive<c10d::ProcessGroupGloo>(meet(meeting), meeting.rank(), meeting.size(), options);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    throw CommError("[zero bench collectives] got '" + text.substr(0, text.find('\n')) +
                    "', expected the gloo library to join the ranks over 127.0.0.1");
  }
}

GlooLibrary::~GlooLibrary() = default;

void GlooLibrary::all_gather(at::Tensor out, at::Tensor in) { state_->group->_allgather_base(out, in)->wait(); }

void GlooLibrary::reduce_scatter(at::Tensor out, at::Tensor in) {
  state_->group->_reduce_scatter_base(out, in)->wait();
}

void GlooLibrary::all_reduce(at::Tensor inout) {
  std::vector<at::Tensor> tensors{inout};
  state_->group->allreduce(tensors)->wait();
}

}  // namespace zero::cli
