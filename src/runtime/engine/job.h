// What a program gave an Engine. It never changes.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <zero/engine.h>
#include <zero/mesh.h>
#include <zero/update_rule.h>

#include "base/check.h"
#include "comm/group.h"

namespace zero::engine {

struct Job {
  // mesh: null: the Engine makes one of `communicator`. rule: null: the configuration's optimizer.
  Job(std::shared_ptr<torch::nn::Module> model, Options options, std::shared_ptr<Communicator> communicator,
      std::shared_ptr<Mesh> mesh, std::shared_ptr<UpdateRule> rule)
      : model(std::move(model)),
        options(std::move(options)),
        settings(this->options.settings()),
        communicator(communicator ? std::move(communicator) : throw ConfigError("[Engine] got no communicator")),
        comm(comm::group_of(*this->communicator)),
        mesh(std::move(mesh)),
        rule(std::move(rule)) {}
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // "[Engine::step] (rank 0/2, step 5) "
  std::string where(const char* call, std::int64_t step = 0) const {
    return base::join("[Engine::", call, "] (rank ", comm->rank(), "/", comm->size(), ", step ", step, ") ");
  }

  const std::shared_ptr<torch::nn::Module> model;
  const Options options;
  const config::Settings& settings;  // of `options`
  const std::shared_ptr<Communicator> communicator;
  const std::shared_ptr<comm::Group> comm;  // the group of `communicator`: all ranks of the run
  const std::shared_ptr<Mesh> mesh;
  const std::shared_ptr<UpdateRule> rule;
};

}  // namespace zero::engine
