// Communicator forwards every call to comm::Group.
#include <zero/communicator.h>

#include "base/check.h"
#include "comm/group.h"

namespace zero {

Communicator::Communicator(std::shared_ptr<comm::Group> group) : group_(std::move(group)) {
  ZERO_CHECK(group_ != nullptr, "a Communicator without ranks");
}
Communicator::~Communicator() = default;

std::shared_ptr<Communicator> Communicator::local() { return comm::make_communicator(comm::make_local()); }

int Communicator::rank() const { return group_->rank(); }
int Communicator::size() const { return group_->size(); }
int Communicator::local_rank() const { return group_->local_rank(); }
int Communicator::local_size() const { return group_->local_size(); }
std::string Communicator::transport() const { return group_->transport(); }

std::shared_ptr<Work> Communicator::all_gather(at::Tensor out, const at::Tensor& in, std::string_view of) {
  return group_->all_gather(std::move(out), in, of);
}
std::shared_ptr<Work> Communicator::reduce_scatter(at::Tensor out, const at::Tensor& in) {
  return group_->reduce_scatter(std::move(out), in);
}
std::shared_ptr<Work> Communicator::all_reduce(at::Tensor inout) { return group_->all_reduce(std::move(inout)); }
std::shared_ptr<Work> Communicator::broadcast(at::Tensor inout, int root) {
  return group_->broadcast(std::move(inout), root);
}
std::shared_ptr<Work> Communicator::all_to_all(at::Tensor out, const at::Tensor& in) {
  return group_->all_to_all(std::move(out), in);
}
std::shared_ptr<Work> Communicator::all_to_all(at::Tensor out, const at::Tensor& in,
                                               const std::vector<std::int64_t>& out_numels,
                                               const std::vector<std::int64_t>& in_numels) {
  return group_->all_to_all(std::move(out), in, out_numels, in_numels);
}
void Communicator::barrier() { group_->barrier(); }
std::vector<std::string> Communicator::all_gather_bytes(std::string_view mine) {
  return group_->all_gather_bytes(mine);
}

std::shared_ptr<Communicator> Communicator::split(int color, int key, std::string_view name) {
  auto group = group_->split(color, key, name);
  return group ? std::make_shared<Communicator>(std::move(group)) : nullptr;
}

void Communicator::abort(const std::string& reason) noexcept { group_->abort(reason); }

at::Tensor Communicator::allocate(std::int64_t numel, c10::ScalarType dtype) { return group_->allocate(numel, dtype); }

std::chrono::milliseconds Communicator::timeout() const { return group_->timeout(); }
void Communicator::set_timeout(std::chrono::milliseconds timeout) { group_->set_timeout(timeout); }
CommStats Communicator::stats() const { return group_->stats(); }
void Communicator::reset_stats() { group_->reset_stats(); }

namespace comm {

std::shared_ptr<Group> group_of(const Communicator& communicator) { return communicator.group_; }

std::shared_ptr<Communicator> make_communicator(std::unique_ptr<Transport> transport) {
  return std::make_shared<Communicator>(std::make_shared<Group>(std::move(transport)));
}

}  // namespace comm
}  // namespace zero
