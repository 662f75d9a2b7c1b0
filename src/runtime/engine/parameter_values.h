// Values of one parameter that a program passes to replace its states or its gradient: their checks and exchange.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "engine/parts.h"

namespace zero::engine {

// The part of a member in [begin, begin + numel) of its group's flat vector; numel 0: none.
sharding::ShardLayout::Piece piece_of(const step::GroupFacts& facts, std::size_t member, std::int64_t begin,
                                      std::int64_t numel);
// In this rank's shard.
sharding::ShardLayout::Piece shard_of(const Parts& parts, const step::GroupFacts& facts, std::size_t member);
// In the range whose states this rank owns.
sharding::ShardLayout::Piece owned_of(const Parts& parts, const step::GroupFacts& facts, std::size_t member);

// ConfigError unless `values` are floating-point and of the parameter's shape, or have `numel` elements.
void require_whole(const std::string& where, const ModelParameter& parameter, const at::Tensor& values);
void require_shard(const std::string& where, const ModelParameter& parameter, std::int64_t numel,
                   const at::Tensor& values);

// The whole parameter, flat, fp32, on the engine's device, the same on every rank: rank 0's `values`, or each rank's
// shard. Collective.
at::Tensor values_of_rank_0(const Parts& parts, const ModelParameter& parameter, const at::Tensor& values);
at::Tensor values_of_shards(const Parts& parts, const step::GroupFacts& facts, std::size_t member,
                            const at::Tensor& values);
// `values` of a rank that has the parameter, which all ranks have the shape of. Collective.
at::Tensor values_of_owner(const Parts& parts, const ModelBinding::Located& parameter, const at::Tensor& values);

}  // namespace zero::engine
