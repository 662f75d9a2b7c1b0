// gathered_parameters() of some units: what is unsharded, its cost, what is written back, and ranks with different
// arguments. With every transport.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "soundness/ranks.h"

namespace zero::test::gathered_units_test {
namespace {

using Names = std::vector<std::string>;

Options options_for(int stage, int world) {
  // In a world of one, parameters are stored sharded only if they are offloaded.
  const bool offloads = stage == 3 && world == 1;
  return Options::from_json(json_for(stage, "AdamW", 1, R"(, "libzero": {"unit_min_numel": 0})",
                                     offloads ? R"(, "offload_param": {"device": "cpu"})" : ""));
}

class GatheredUnits : public ::testing::TestWithParam<int> {
 protected:
  int stage() const { return GetParam(); }
  void everywhere(const std::function<void(Engine&, Net&, int rank, int world)>& body) const {
    for (const auto& place : places()) {
      const auto errors = run_at(place, [&](std::shared_ptr<Communicator> comm) {
        auto net = make_net();
        Engine engine(net, options_for(stage(), comm->size()), comm);
        body(engine, *net, comm->rank(), comm->size());
        engine.backward(loss_of(*net, comm->rank(), 0));  // the run continues
        engine.step();
      });
      EXPECT_EQ(errors, "") << name_of(place) << ", stage " << stage();
    }
  }
};

at::Tensor& parameter(Net& net, const std::string& name) { return net.named_parameters()[name]; }

std::int64_t bytes_of_units(Engine& engine, const Names& names) {
  std::int64_t sum = 0;
  for (const auto& [unit, numel] : engine.units())
    if (names.empty() || std::find(names.begin(), names.end(), unit) != names.end()) sum += 4 * numel;
  return sum;
}

// Raw pointers may be taken of parameters in a scope; at stage 3 other parameters are refused as without a scope.
bool readable(Net& net, const std::string& name) {
  try {
    return parameter(net, name).const_data_ptr<float>() != nullptr;
  } catch (const std::exception& e) {
    require(contains(e.what(), "past the dispatcher"), e.what());
    return false;
  }
}

TEST_P(GatheredUnits, OnlyTheUnitsAskedForAreWhole) {
  everywhere([this](Engine& engine, Net& net, int, int) {
    const auto reference = make_net();
    const auto expected = [&](const std::string& name) { return reference->named_parameters()[name].detach(); };
    require(engine.units().size() == 5, "units: " + std::to_string(engine.units().size()));
    const auto check = [&](GatheredParameters scope, const Names& whole, const std::string& what) {
      for (const auto& item : reference->named_parameters()) {
        const auto& name = item.key();
        const auto unit = name.starts_with("head") ? std::string("root") : name.substr(0, name.rfind('.'));
        const bool inside = std::find(whole.begin(), whole.end(), unit) != whole.end();
        require(readable(net, name) == (inside || stage() < 3), what + ": " + name);
      }
      for (const auto& item : reference->named_parameters())  // operators can read all parameters, as always
        require(torch::equal(parameter(net, item.key()), expected(item.key())), what + " value " + item.key());
      scope.close();
      require(readable(net, "layers.0.weight") == (stage() < 3), what + ": closed");
    };
    check(engine.gathered_parameters({"layers.2.weight"}), {"layers.2"}, "a parameter");
    check(engine.gathered_parameters({"layers.0", "root"}), {"layers.0", "root"}, "units");
    check(engine.gathered_parameters({"layers.?.bias"}), {"layers.0", "layers.1", "layers.2", "layers.3"}, "a pattern");
    check(engine.gathered_parameters(Names{}), {}, "nothing");
    check(engine.gathered_parameters(*net.layers), {"layers.0", "layers.1", "layers.2", "layers.3"}, "a module");
    check(engine.gathered_parameters(*net.layers->ptr(2)), {"layers.2"}, "an entry");
    check(engine.gathered_parameters(*net.head), {"root"}, "a holder's module");
    check(engine.gathered_parameters(), {"layers.0", "layers.1", "layers.2", "layers.3", "root"}, "everything");
  });
}

TEST_P(GatheredUnits, TheMemoryIsThatOfTheUnits) {
  everywhere([this](Engine& engine, Net&, int, int) {
    const auto peak = [&](const Names& names) {
      engine.reset_peak_memory();
      auto scope = names.empty() ? engine.gathered_parameters() : engine.gathered_parameters(names);
      scope.close();
      return static_cast<std::int64_t>(
          engine.memory().peak(MemoryReport::Tier::Device, MemoryReport::Purpose::GatherBuffers));
    };
    for (const Names& names : {Names{"layers.2"}, Names{"layers.0", "layers.3"}, Names{}}) {
      const auto least = stage() < 3 ? 0 : bytes_of_units(engine, names);
      const auto got = peak(names);
      // Padding of shards, at most a page per unit and rank.
      require(got >= least && got <= (stage() < 3 ? 0 : least + 5 * 3 * 4096),
              "peak " + std::to_string(got) + ", units " + std::to_string(least));
    }
    if (stage() == 3) require(4 * peak({"layers.1"}) < peak({"layers.2"}), "a small unit costs as much as a large one");
  });
}

// Only rank 0 writes, in the learned order of use; this must not start an all-gather.
TEST_P(GatheredUnits, OverlappingScopesWriteBackTheirUnits) {
  everywhere([this](Engine& engine, Net& net, int rank, int) {
    for (int batch = 1; batch < 4; ++batch) {
      engine.backward(loss_of(net, rank, batch));
      engine.step();
    }
    std::map<std::string, at::Tensor> start;
    for (const auto& item : net.named_parameters()) start[item.key()] = item.value().detach().clone();
    const auto before = [&](const std::string& name) { return start.at(name); };
    {
      const at::NoGradGuard no_grad;
      auto outer = engine.gathered_parameters({"layers.0", "layers.2"}, true);
      if (rank == 0) parameter(net, "layers.0.weight").mul_(2);
      if (rank == 0) parameter(net, "layers.2.weight").mul_(3);
      {
        auto reading = engine.gathered_parameters({"layers.*"});
        auto inner = engine.gathered_parameters(Names{"layers.2.bias", "layers.3.*"}, true);
        if (rank == 0) parameter(net, "layers.2.weight").add_(1);
        if (rank == 0) parameter(net, "layers.3.weight").add_(5);
        inner.close();
        require(torch::equal(parameter(net, "layers.2.weight"), before("layers.2.weight") * 3 + 1), "inner");
        reading.close();
      }
      if (stage() == 3) require(!readable(net, "layers.3.weight"), "layers.3 is still whole");
      require(readable(net, "layers.2.weight"), "layers.2 is no longer whole");
      require(torch::equal(parameter(net, "layers.3.weight"), before("layers.3.weight") + 5), "inner, closed");
      for (const char* other : {"layers.3.weight", "layers.1.weight", "head.weight"}) {
        const auto text = error_of([&] { parameter(net, other).mul_(2); }, other);
        require(contains(text, "gathered_parameters(true)"), text);
      }
      if (rank == 0) parameter(net, "layers.2.weight").mul_(2);
      outer.close();
    }
    const auto masters = engine.full_state_dict();
    for (const auto& [name, value] : start) {
      auto expected = value;
      if (name == "layers.0.weight") expected = expected * 2;
      if (name == "layers.2.weight") expected = (expected * 3 + 1) * 2;
      if (name == "layers.3.weight") expected = expected + 5;
      require(torch::equal(parameter(net, name), expected), "after: " + name);
      if (rank == 0) require(torch::equal(masters.at(name), expected), "master: " + name);
    }
  });
}

TEST_P(GatheredUnits, NamesThatMatchNothing) {
  everywhere([](Engine& engine, Net&, int, int world) {
    const auto text = error_of(
        [&] {
          (void)engine.gathered_parameters({"layers.0.wieght", "layers.1", "heads.*"});
        },
        "names that match nothing");
    require(contains(text, "\"layers.0.wieght\" (did you mean \"layers.0.weight\"?); \"heads.*\""), text);
    require(!contains(text, "\"layers.1\""), text);
    torch::nn::Linear other(2, 2);
    const auto foreign = error_of([&] { (void)engine.gathered_parameters(*other); }, "a foreign module");
    require(contains(foreign, "no parameter of this Engine"), foreign);
    require(world == 1 || contains(text, "rank "), text);
  });
}

TEST_P(GatheredUnits, RanksThatAskForDifferentThings) {
  everywhere([](Engine& engine, Net&, int rank, int world) {
    if (world == 1) return;
    const auto units =
        error_of([&] { (void)engine.gathered_parameters({rank == 1 ? "layers.0" : "layers.2"}); }, "units");
    require(contains(units, "the units asked for on rank 0 and on rank"), units);
    require(contains(units, "\"layers.2\" against \"layers.0\""), units);
    const auto modes = error_of([&] { (void)engine.gathered_parameters({"layers.0"}, rank == 1); }, "read or write");
    require(contains(modes, "\"to read\" against \"to write\""), modes);
    const auto whole = error_of(
        [&] { (void)(rank == 1 ? engine.gathered_parameters() : engine.gathered_parameters({"root"})); }, "everything");
    require(contains(whole, "the units asked for"), whole);
    const auto one =
        error_of([&] { (void)engine.gathered_parameters({rank == 1 ? "layer.0" : "layers.0"}); }, "a slip");
    require(contains(one, "rank 1/") && contains(one, "did you mean \"layers.0\"?"), one);
  });
}

TEST_P(GatheredUnits, WhatMayBeCalledInside) {
  const auto folder = std::filesystem::temp_directory_path() / ("zero-units-" + std::to_string(::getpid()));
  everywhere([&](Engine& engine, Net& net, int rank, int) {
    const auto outside = loss_of(net, rank, 1).detach().clone();
    engine.save_checkpoint(folder, "before");
    {
      auto scope = engine.gathered_parameters({"layers.2"});
      require(torch::equal(loss_of(net, rank, 1), outside), "a forward within");
      require(torch::equal(loss_of(net, rank, 1), outside), "another");
      for (const auto& text : {error_of([&] { engine.backward(loss_of(net, rank, 1)); }, "backward"),
                               error_of([&] { (void)engine.step(); }, "step"),
                               error_of([&] { engine.load_checkpoint(folder, "before"); }, "load")})
        require(contains(text, "inside a scope"), text);
      engine.save_checkpoint(folder, "reading");
      scope.close();
    }
    auto scope = engine.gathered_parameters({"layers.2"}, true);
    const auto text = error_of([&] { engine.save_checkpoint(folder, "writing"); }, "save");
    require(contains(text, "inside a scope"), text);
    scope.close();
    engine.load_checkpoint(folder, "reading");
  });
  std::filesystem::remove_all(folder);
}

INSTANTIATE_TEST_SUITE_P(Stages, GatheredUnits, ::testing::Values(0, 2, 3));

// If groups are gathered as 8-bit integers, a scope has exact copies; a nested scope must not overwrite modifications.
TEST(GatheredUnitsQuantized, AnInnerScopeKeepsWhatTheOuterWrote) {
  const auto errors = run_at({"gloo", 2}, [](std::shared_ptr<Communicator> comm) {
    auto net = make_net();
    Engine engine(net,
                  Options::from_json(json_for(3, "AdamW", 1, R"(, "libzero": {"unit_min_numel": 0})",
                                              R"(, "zero_quantized_weights": true)")),
                  comm);
    const at::NoGradGuard no_grad;
    const auto before = make_net()->named_parameters()["layers.2.weight"].detach().clone();
    auto outer = engine.gathered_parameters(true);
    if (comm->rank() == 0) parameter(*net, "layers.2.weight").mul_(2);
    auto inner = engine.gathered_parameters({"layers.2"});
    inner.close();
    outer.close();
    auto scope = engine.gathered_parameters({"layers.2"});
    require(torch::equal(parameter(*net, "layers.2.weight"), before * 2), "the write was lost");
    scope.close();
  });
  EXPECT_EQ(errors, "");
}

}  // namespace
}  // namespace zero::test::gathered_units_test
