// The digest of the state of all ranks, equal to that of a checkpoint of it. See checkpoint.h.
#include <map>

#include "checkpoint/checkpoint.h"
#include "engine/rank_agreement.h"
#include "formats/digest.h"
#include "formats/hash.h"
#include "formats/slices.h"

namespace zero::checkpoint {
namespace {

constexpr const char* kLogicalHash = "logical_hash";
constexpr std::int64_t kMostElements = std::int64_t{1} << 20;  // read at once

}  // namespace

std::string logical_hash(engine::State& state) {
  const at::NoGradGuard no_grad;
  auto& comm = *state.parts.comm;
  state.stepper->flush();
  (void)engine::agree(comm, kLogicalHash, [&] {
    state.checks.require_usable(kLogicalHash);
    return "";
  });
  if (state.parts.experts) state.parts.experts->share_buffers();
  std::vector<engine::StatePiece> pieces;
  // Buffers that differ between ranks are private; the others are rank 0's.
  const auto buffers = engine::agree(comm, kLogicalHash, [&] {
    pieces = state.exports->pieces_to_save();
    std::string hashes;
    for (const auto& piece : pieces) {
      if (piece.kind != kBuffer) continue;
      const auto data = piece.read(0, piece.numel);
      hashes += formats::hash_of(data.const_data_ptr(), data.nbytes());
    }
    return hashes;
  });
  const auto digests = engine::agree(comm, kLogicalHash, [&] {
    std::map<std::pair<std::string, std::string>, std::vector<std::vector<formats::Box>>> slices;
    for (auto& tensor : tensors_of(state))
      if (!tensor.slices.empty()) slices[{tensor.kind, tensor.name}] = std::move(tensor.slices);
    formats::Digest digest;
    std::size_t buffer = 0;
    for (const auto& piece : pieces) {
      if (piece.kind == kBuffer) {
        const auto at = 32 * buffer++;
        bool shared = comm.rank() == 0;
        for (const auto& rank : buffers) shared = shared && rank.compare(at, 32, buffers[0], at, 32) == 0;
        if (!shared) continue;
      }
      const auto cut = slices.find({piece.kind, piece.name});
      for (std::int64_t at = 0; at < piece.numel; at += kMostElements) {
        const auto numel = std::min(kMostElements, piece.numel - at);
        const auto data = piece.read(at, numel);
        const auto* const bytes = static_cast<const char*>(data.const_data_ptr());
        const auto width = static_cast<int>(data.element_size());
        const auto begin = piece.begin + at;
        const auto add = [&](const formats::Run& run) {
          digest.add(piece.kind + "/" + piece.name, run.stored, bytes + (run.wanted - begin) * width, run.numel, width);
        };
        if (cut == slices.end())
          add({begin, begin, numel});
        else
          for (const auto& run : formats::runs_between(piece.shape, cut->second, {}, begin, begin + numel)) add(run);
      }
    }
    return digest.hex();
  });
  formats::Digest all;
  for (const auto& digest : digests) all.add(digest);
  return all.hex();
}

}  // namespace zero::checkpoint
