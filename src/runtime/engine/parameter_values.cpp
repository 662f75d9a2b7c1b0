// See parameter_values.h.
#include "engine/parameter_values.h"

#include <ATen/ATen.h>

#include "base/check.h"
#include "engine/tensor_parts.h"

namespace zero::engine {
namespace {

std::string text_of(const at::Tensor& values) {
  return values.defined() ? base::join(values.toString(), values.sizes()) : "an undefined tensor";
}

}  // namespace

sharding::ShardLayout::Piece piece_of(const step::GroupFacts& facts, std::size_t member, std::int64_t begin,
                                      std::int64_t numel) {
  for (const auto& piece : facts.layout.pieces(begin, numel))
    if (piece.parameter == member) return piece;
  return {member, 0, 0, 0};
}

sharding::ShardLayout::Piece shard_of(const Parts& parts, const step::GroupFacts& facts, std::size_t member) {
  return piece_of(facts, member, parts.run.shard_begin(facts), facts.shard());
}

sharding::ShardLayout::Piece owned_of(const Parts& parts, const step::GroupFacts& facts, std::size_t member) {
  return piece_of(facts, member, parts.run.owned_begin(facts), facts.owned());
}

void require_whole(const std::string& where, const ModelParameter& parameter, const at::Tensor& values) {
  if (!values.defined() || values.sizes() != at::IntArrayRef(parameter.sizes) || !values.is_floating_point())
    throw ConfigError(where + base::join("got ", text_of(values), " for ", parameter.name,
                                         ", expected floating-point values of shape ",
                                         at::IntArrayRef(parameter.sizes)));
}

void require_shard(const std::string& where, const ModelParameter& parameter, std::int64_t numel,
                   const at::Tensor& values) {
  if (!values.defined() || values.numel() != numel || !values.is_floating_point())
    throw ConfigError(where + base::join("got ", text_of(values), " for ", parameter.name, ", expected the ", numel,
                                         " floating-point elements of this rank's shard"));
}

at::Tensor values_of_rank_0(const Parts& parts, const ModelParameter& parameter, const at::Tensor& values) {
  auto flat =
      values.detach().to(parts.device, at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous().view({-1});
  if (parts.comm->size() > 1 && flat.numel() > 0) parts.comm->broadcast(flat, 0)->wait();
  return part_of(parameter, flat, parts.tensor_group->rank()).view({-1});
}

at::Tensor values_of_shards(const Parts& parts, const step::GroupFacts& facts, std::size_t member,
                            const at::Tensor& values) {
  // An expert's of other ranks has no values here, and takes none.
  const auto own = values.numel() == 0 ? piece_of(facts, member, 0, 0) : shard_of(parts, facts, member);
  auto mine = at::zeros({facts.shard()}, at::TensorOptions().dtype(at::kFloat).device(parts.device));
  mine.narrow(0, own.range_begin, own.numel).copy_(values.detach().reshape({-1}));
  auto whole = mine;
  if (auto& ranks = parts.ranks_of(facts); ranks.size() > 1 && facts.padded() > 0) {
    whole = at::empty({facts.padded()}, mine.options());
    ranks.all_gather(whole, mine)->wait();
  }
  return whole.narrow(0, facts.layout.parameter_offset(member), facts.layout.parameter_numel(member));
}

at::Tensor values_of_owner(const Parts& parts, const ModelBinding::Located& parameter, const at::Tensor& values) {
  if (parameter.place < 0 || values.numel() == 0) return values;
  const auto& member = parts.binding().group(parameter.group).members[parameter.member];
  auto result = values.contiguous().clone();
  parts.experts->expert_group(member.expert->ep_size).broadcast(result.view({-1}), parameter.place)->wait();
  return result;
}

}  // namespace zero::engine
