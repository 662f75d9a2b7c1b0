#include <zero/errors.h>
#include <zero/mesh.h>

#include "base/check.h"
#include "config/batch.h"
#include "parallel/mesh_degrees.h"

namespace zero {

std::shared_ptr<Mesh> Mesh::of(const Options& options, std::shared_ptr<Communicator> world) {
  if (!world) throw ConfigError("[Mesh] got no communicator");
  if (world->size() > 1)
    parallel::require_equal_degrees("[Mesh] ", world->all_gather_bytes(parallel::degrees_of(options)));
  return parallel::MeshMaker::make(options, std::move(world));
}

std::shared_ptr<Mesh> parallel::MeshMaker::make(const Options& options, std::shared_ptr<Communicator> world) {
  const auto shape = config::mesh_shape(options, world->size());
  const int t = shape.tensor, u = shape.sequence, rank = world->rank();
  const int j = rank % t, i = rank / t % u, d = rank / t / u;
  std::shared_ptr<Mesh> mesh(new Mesh(world));
  mesh->data_before_experts_ = options.settings().mesh.data_before_experts;
  // Ranks of one color differ only along the dimension.
  const auto add = [&](const char* name, int size, int coordinate, int color) {
    auto group = size == world->size() ? world
                 : size == 1           ? Communicator::local()
                                       : world->split(color, coordinate, name);
    mesh->dims_.emplace(name, Mesh::Dim{size, coordinate, std::move(group)});
  };
  add("tp", t, j, rank / t);
  add("sp", u, i, d * t + j);
  add("dp", shape.data, d, i * t + j);
  if (u == 1)
    mesh->dims_.emplace("dp_sp", mesh->at("dp"));
  else if (shape.data == 1)
    mesh->dims_.emplace("dp_sp", mesh->at("sp"));
  else
    add("dp_sp", shape.data * u, d * u + i, j);
  return mesh;
}

const Mesh::Dim& Mesh::at(std::string_view dim) const {
  const auto found = dims_.find(dim);
  if (found == dims_.end())
    throw ConfigError(base::join("[Mesh] got the dimension \"", dim, "\", expected dp, sp, tp or dp_sp"));
  return found->second;
}

const Mesh::Experts& Mesh::experts(int ep_size) const {
  const auto known = experts_.find(ep_size);
  if (known != experts_.end()) return known->second;
  const auto& all = at("dp_sp");
  if (ep_size < 1 || all.size % ep_size != 0)
    throw ConfigError(base::join("[Mesh::experts] got ep_size ", ep_size, ", expected a divisor of ", all.size,
                                 " ranks along dp_sp"));
  const auto grid = parallel::ExpertGrid::of(all.rank, all.size, ep_size, data_before_experts_);
  const auto group = [&](const char* name, int size, int color, int key) {
    // With sequence-parallel ranks alone, `all` are those of sp, whose all-to-alls are counted apart.
    const bool counted_apart = name == std::string_view("ep") && size > 1 && this->size("sp") == size;
    return size == all.size && !counted_apart ? all.group
           : size == 1                        ? Communicator::local()
                                              : all.group->split(color, key, name);
  };
  return experts_
      .emplace(ep_size,
               Experts{group("ep", ep_size, grid.copy, grid.place), group("edp", grid.copies, grid.place, grid.copy)})
      .first->second;
}

std::pair<std::int64_t, std::int64_t> Mesh::tokens(std::int64_t tokens) const {
  if (tokens < 0) throw ConfigError(base::join("[Mesh::tokens] got ", tokens, " tokens, expected 0 or more"));
  const std::int64_t u = size("sp"), i = rank("sp");
  return {i * tokens / u, (i + 1) * tokens / u};
}

std::string Mesh::text() const {
  return base::join(world_->size(), world_->size() == 1 ? " rank = " : " ranks = ", size("dp"), " dp x ", size("sp"),
                    " sp x ", size("tp"), " tp; rank ", world_->rank(), " is dp ", rank("dp"), ", sp ", rank("sp"),
                    ", tp ", rank("tp"));
}

}  // namespace zero
