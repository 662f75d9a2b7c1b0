// Parameters that stay fp32 (libzero.keep_fp32) with tensor parallelism and with experts. Where all of them stay fp32,
// a run in bf16 has the bits of a run in fp32, and its results are those of one process.
#include <gtest/gtest.h>
#include <zero/library.h>

#include <string>

#include "parity/mesh_problems.h"
#include "parity/moe_problems.h"
#include "support/require.h"

namespace zero::test::keep_fp32_mesh_test {
namespace {

std::string keep(const std::string& patterns) { return R"(, "libzero": {"keep_fp32": )" + patterns + "}"; }

TEST(KeepFp32Mesh, PartsAndWholeParametersStayFp32) {
  mesh::expect_passed({"shm", 4}, [](const auto& comm) {
    for (const auto& model : mesh::models()) {
      mesh::Case single{.model = &model, .stage = 0};
      const auto wanted = mesh::train_by_hand(single, /*data_ranks=*/2, comm->rank() / 2);
      for (const int stage : {0, 3}) {
        auto kept = single;
        kept.stage = single.stage = stage;
        kept.recipe = "bf16", kept.extra = keep("\"*\"");
        const auto got = mesh::train(kept, comm);
        mesh::compare(got, wanted, single, *comm);
        require(got.hash == mesh::train(single, comm).hash, std::string(model.name) + ": other bits than in fp32");
      }
    }
  });
}

// Norms are whole on every rank, next to parts in bf16.
TEST(KeepFp32Mesh, NormsOfAGptStayFp32) {
  mesh::expect_passed({"shm", 4}, [](const auto& comm) {
    mesh::Case c{.model = &mesh::gpt_model(), .recipe = "bf16", .extra = keep("\"*norm*\"")};
    const auto wanted = mesh::train_by_hand(c, /*data_ranks=*/2, comm->rank() / 2);
    std::string hash;
    for (c.stage = 0; c.stage <= 3; ++c.stage) {
      const auto got = mesh::train(c, comm);
      mesh::compare(got, wanted, c, *comm);
      if (hash.empty()) hash = got.hash;
      require(got.hash == hash, "another state at stage " + std::to_string(c.stage));
    }
  });
}

TEST(KeepFp32Mesh, ExpertsStayFp32) {
  mesh::expect_passed({"shm", 4}, [](const auto& comm) {
    const auto train = [&](int stage, const std::string& recipe, const std::string& extra) {
      const auto net = moe::make_net(moe::options_of(/*ep_size=*/2, /*k=*/2));
      Engine engine(net, moe::engine_options(stage, recipe, extra), comm);
      for (int step = 0; step < 3; ++step) {
        engine.backward(moe::loss_of(*net, step, comm->rank()));
        engine.step();
      }
      return engine.state_hash();
    };
    for (const int stage : {1, 3})
      require(train(stage, "bf16", keep("\"*\"")) == train(stage, "fp32", ""), "other bits than in fp32");
    require(train(1, "bf16", keep("\"*gate.wg.weight\"")) == train(3, "bf16", keep("\"*gate.wg.weight\"")),
            "gates: another state at stage 3");

    std::string text;
    try {
      train(3, "bf16", keep("\"*.experts.1.*\""));
    } catch (const std::exception& error) {
      text = error.what();
    }
    require(contains(text, "libzero.keep_fp32 must name a parameter in all experts or in none"), text);
  });
}

}  // namespace
}  // namespace zero::test::keep_fp32_mesh_test
