// Exchanges that consist of messages: of one string a rank, and of the parts of an all_to_all.
#include <algorithm>
#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "base/check.h"
#include "comm/gloo/messenger.h"

namespace zero::comm {
namespace {

// Bytes of a control message that need no second round, and of the slot that holds it.
constexpr std::int64_t kInline = 248, kSlot = kInline + 8;
// A longer one is no message of all_gather_bytes.
constexpr std::int64_t kMostBytes = std::int64_t{4} << 30;

}  // namespace

// One slot per rank: the length, and the message if it fits, so that barriers and most control messages need one round.
// Longer messages follow in a second round.
std::vector<std::string> all_gather_bytes(MessageWork& work, const std::vector<int>& ranks, std::size_t own,
                                          std::string_view mine) {
  std::vector<std::string> messages(ranks.size());
  messages[own] = mine;
  auto slots = at::zeros({static_cast<std::int64_t>(ranks.size()), kSlot}, at::kByte);
  const auto slot = [&](std::size_t i) { return static_cast<char*>(slots.mutable_data_ptr()) + i * kSlot; };
  const auto length = [&](std::size_t i) {
    std::uint64_t bytes;
    std::memcpy(&bytes, slot(i), sizeof bytes);
    return static_cast<std::int64_t>(bytes);
  };
  const auto each_peer = [&](const auto& body) {
    for (std::size_t i = 1; i < ranks.size(); ++i) body((own + i) % ranks.size());
  };
  const auto in_slot = mine.substr(0, kInline);
  const std::uint64_t own_length = mine.size();
  std::memcpy(slot(own), &own_length, sizeof own_length);
  std::copy(in_slot.begin(), in_slot.end(),
            slot(own) + sizeof own_length);  // the data pointer of an empty one may be null
  each_peer([&](std::size_t i) { work.receive(ranks[i], slots[static_cast<std::int64_t>(i)]); });
  each_peer([&](std::size_t i) { work.send(ranks[i], slots[static_cast<std::int64_t>(own)]); });
  std::vector<at::Tensor> rest(ranks.size());
  work.then_post([&] {
    each_peer([&](std::size_t i) {
      if (length(i) < 0 || length(i) > kMostBytes)
        work.fail_all_ranks(base::join("got a message of ", static_cast<std::uint64_t>(length(i)), " bytes from rank ",
                                       ranks[i], ", expected at most ", kMostBytes));
      rest[i] = at::empty({std::max<std::int64_t>(0, length(i) - kInline)}, at::kByte);
      work.receive(ranks[i], rest[i]);
    });
    const auto own_rest = at::empty({std::max<std::int64_t>(0, length(own) - kInline)}, at::kByte);
    if (own_rest.numel() > 0) std::memcpy(own_rest.mutable_data_ptr(), mine.data() + kInline, own_rest.nbytes());
    each_peer([&](std::size_t i) { work.send(ranks[i], own_rest); });
  });
  work.wait();
  each_peer([&](std::size_t i) {
    messages[i].assign(slot(i) + sizeof(std::uint64_t), static_cast<std::size_t>(std::min(length(i), kInline)));
    if (rest[i].numel() > 0) messages[i].append(static_cast<const char*>(rest[i].const_data_ptr()), rest[i].nbytes());
  });
  return messages;
}

void post_parts(MessageWork& work, const net::ProcessInfo& identity, const std::vector<int>& peers,
                const std::vector<at::Tensor>& out, const std::vector<at::Tensor>& in, bool equal) {
  const auto part = [](const std::vector<at::Tensor>& parts, int rank) {
    return parts[static_cast<std::size_t>(rank)].view(at::kByte);
  };
  const auto post = [part, peers, out, in, work = &work] {
    for (const int peer : peers) work->receive(peer, part(out, peer));
    for (const int peer : peers) work->send(peer, part(in, peer));
  };
  if (equal) return post();
  const auto count = static_cast<std::int64_t>(in.size());
  auto mine = at::empty({count}, at::kLong), theirs = at::empty({count}, at::kLong);
  const auto word = [](const at::Tensor& words, int rank) { return words.narrow(0, rank, 1).view(at::kByte); };
  for (const int peer : peers) {
    mine.mutable_data_ptr<std::int64_t>()[peer] = in[static_cast<std::size_t>(peer)].numel();
    work.receive(peer, word(theirs, peer));
  }
  for (const int peer : peers) work.send_control(peer, word(mine, peer));
  work.then_post([post, peers, mine, theirs, identity, out, work = &work] {
    for (const int peer : peers) {
      const auto sent = theirs.const_data_ptr<std::int64_t>()[peer],
                 expected = out[static_cast<std::size_t>(peer)].numel();
      if (sent != expected)
        work->fail_all_ranks(parts_differ(identity.name_of(peer), sent, identity.name_of(identity.rank), expected));
    }
    post();
  });
}

std::vector<int> hosts_of(const Messenger& messenger, const net::ProcessInfo& identity) {
  std::vector<int> hosts;
  for (int r = 0; r < identity.size; ++r)
    hosts.push_back(identity.one_host() ? 0 : messenger.hosts().empty() ? r : messenger.hosts().host_of(r));
  return hosts;
}

}  // namespace zero::comm
