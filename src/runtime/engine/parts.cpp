// See parts.h.
#include "engine/parts.h"

#include "base/check.h"

namespace zero::engine {

Parts::Parts(std::shared_ptr<torch::nn::Module> model, Options options, std::shared_ptr<Communicator> comm,
             std::shared_ptr<Mesh> mesh)
    : model(std::move(model)),
      options(std::move(options)),
      settings(this->options.settings()),
      communicator(comm ? std::move(comm) : throw ConfigError("[Engine] got no communicator")),
      comm(comm::group_of(*communicator)),
      mesh(std::move(mesh)),
      relay(*this->comm) {}

Parts::~Parts() {
  if (backend) backend->update.settle();  // its job uses the members below
  program.reset();
  backend.reset();
  if (memory) memory->close();
}

std::string Parts::where(const char* call) const {
  return base::join("[Engine::", call, "] (rank ", comm->rank(), "/", comm->size(), ", step ",
                    program ? program->steps() : 0, ") ");
}

}  // namespace zero::engine
