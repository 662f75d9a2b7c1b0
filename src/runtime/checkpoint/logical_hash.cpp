// The digest of the state of all ranks, equal to that of a checkpoint of it. See checkpoint.h.
#include "checkpoint/checkpoint.h"
#include "engine/rank_agreement.h"
#include "formats/digest.h"
#include "formats/slices.h"

namespace zero::checkpoint {
namespace {

constexpr const char* kLogicalHash = "logical_hash";
constexpr std::int64_t kMostElements = std::int64_t{1} << 20;  // read at once

}  // namespace

std::string logical_hash(engine::State& state) {
  const at::NoGradGuard no_grad;
  auto& comm = *state.job.comm;
  state.stepper.flush();
  (void)engine::agree(comm, kLogicalHash, [&] {
    state.checks.require_usable(kLogicalHash);
    return "";
  });
  if (state.parts.experts) state.parts.experts->share_buffers();
  std::vector<engine::StatePiece> pieces;
  // Buffers that differ between ranks are private; the others are rank 0's.
  const auto buffers = engine::agree(comm, kLogicalHash, [&] {
    pieces = state.exports.pieces_to_save();
    return hashes_of_buffers(pieces);
  });
  const auto digests = engine::agree(comm, kLogicalHash, [&] {
    const auto slices = cut_slices(state);
    formats::Digest digest;
    std::size_t buffer = 0;
    for (const auto& piece : pieces) {
      if (piece.kind == kPrivate) continue;
      if (piece.kind == kBuffer && (!is_shared(buffers, buffer++) || comm.rank() != 0)) continue;
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
