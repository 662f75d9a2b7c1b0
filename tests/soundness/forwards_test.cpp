// Unusual uses of parameters: operators with very many of them, forwards in several threads, metadata only, evaluation
// in inference mode. Values are compared with a plain module's.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/adamw.h>

#include <atomic>
#include <set>
#include <thread>

#include "soundness/small_programs.h"

namespace zero::test::forwards_test {
namespace {

struct Transport {
  int world;
  const char* zero;
  const char* what;
};
const Transport kSharded[] = {{1, kOffloadedParameters, "a world of one, offloaded parameters"},
                              {2, "", "threads"},
                              {2, R"(, "stage3_prefetch_bucket_size": 0)", "threads, nothing gathered ahead"}};

void each_rank(const Transport& transport, const std::function<void(std::shared_ptr<Communicator>)>& body) {
  SCOPED_TRACE(transport.what);
  for (const auto& error : errors_of_ranks(transport.world, body)) EXPECT_EQ(error, "");
}

at::Tensor all_values(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> flat;
  for (const auto& p : parameters) flat.push_back(p.detach().reshape({-1}));
  return torch::cat(flat);
}

TEST(ManyParameters, InOneOperator) {
  for (const auto& transport : kSharded)
    each_rank(transport, [&](std::shared_ptr<Communicator> comm) {
      const auto plain = small_model(80);
      auto model = small_model(80);  // 160 parameters in 80 units
      Engine engine(model, small_options(3, transport.zero), comm);
      torch::NoGradGuard no_grad;
      const auto expected = all_values(plain->parameters());
      for (int again = 0; again < 2; ++again) {
        EXPECT_TRUE(torch::equal(torch::nn::utils::parameters_to_vector(model->parameters()), expected));
        const auto norms = at::_foreach_norm(model->parameters()), wanted = at::_foreach_norm(plain->parameters());
        for (std::size_t i = 0; i < norms.size(); ++i) EXPECT_TRUE(torch::equal(norms[i], wanted[i])) << i;
        // A parameter twice in one list.
        auto list = model->parameters();
        for (const auto& p : model->parameters()) list.push_back(p);
        EXPECT_EQ(at::_foreach_norm(list).size(), 320u);
      }
    });
}

TEST(ManyParameters, InTheLoss) {
  for (const auto& transport : kSharded)
    each_rank(transport, [&](std::shared_ptr<Communicator> comm) {
      auto model = small_model(40), plain = small_model(40);
      Engine engine(model, small_options(3, transport.zero), comm);
      for (int step = 0; step < 3; ++step) {
        auto flat = torch::nn::utils::parameters_to_vector(model->parameters());
        engine.backward(model->forward(small_input(step)).pow(2).mean() + flat.pow(2).sum() * 0.01);
        engine.step();
      }
      // The same in plain libtorch: every rank has the same batch, so the mean over ranks is one rank's.
      torch::optim::AdamW adam(plain->parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0));
      for (int step = 0; step < 3; ++step) {
        auto flat = torch::nn::utils::parameters_to_vector(plain->parameters());
        adam.zero_grad();
        (plain->forward(small_input(step)).pow(2).mean() + flat.pow(2).sum() * 0.01).backward();
        adam.step();
      }
      const auto masters = engine.full_state_dict();
      if (comm->rank() != 0) return;
      for (const auto& item : plain->named_parameters())
        EXPECT_LT((masters.at(item.key()) - item.value().detach()).abs().max().item<double>(), 2e-4) << item.key();
    });
}

// --- forwards in several threads --------------------------------------------------------------

// libtorch's OpenMP teams, one per thread of the program, would only wait for each other here.
class OneThreadEach {
 public:
  OneThreadEach() : before_(at::get_num_threads()) { at::set_num_threads(1); }
  ~OneThreadEach() { at::set_num_threads(before_); }

 private:
  int before_;
};

void forwards_in_threads(int stage, const std::string& zero, bool grad, int times, int threads = 2) {
  const OneThreadEach one;
  SCOPED_TRACE(std::to_string(stage) + zero + (grad ? ", with grad" : ", without"));
  auto model = small_model(6, 64), plain = small_model(6, 64);
  Engine engine(model, small_options(stage, zero), Communicator::local());
  std::vector<at::Tensor> inputs, expected;
  for (int i = 0; i < 8; ++i) {
    inputs.push_back(small_input(i, 64));
    expected.push_back(plain->forward(inputs.back()).detach());
  }
  std::atomic<int> wrong{0}, failed{0};
  std::string first;
  std::mutex mutex;
  const auto work = [&](int thread) {
    try {
      at::set_num_threads(1);
      const torch::AutoGradMode mode(grad);
      for (int i = 0; i < times; ++i) {
        const auto k = static_cast<std::size_t>((i * 3 + thread) % 8);
        wrong += !torch::equal(model->forward(inputs[k]).detach(), expected[k]);
      }
    } catch (const std::exception& e) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (failed++ == 0) first = e.what();
    }
  };
  std::vector<std::thread> running;
  for (int t = 0; t < threads; ++t) running.emplace_back(work, t);
  for (auto& thread : running) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(failed, 0) << first;
  // Training continues.
  torch::optim::AdamW adam(plain->parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0));
  for (int step = 0; step < 3; ++step) {
    engine.backward(model->forward(inputs[0]).pow(2).mean());
    engine.step();
    adam.zero_grad();
    plain->forward(inputs[0]).pow(2).mean().backward();
    adam.step();
  }
  torch::NoGradGuard no_grad;
  EXPECT_LT((model->forward(inputs[1]) - plain->forward(inputs[1])).abs().max().item<double>(), 1e-4);
}

TEST(ForwardsInThreads, BelowStage3) {
  forwards_in_threads(0, "", true, 2000);
  forwards_in_threads(2, "", false, 2000);
}

TEST(ForwardsInThreads, Stage3) {
  forwards_in_threads(3, "", true, 10000);
  forwards_in_threads(3, "", false, 10000);
}

// Groups are unsharded into buffers and resharded to make room for each other.
TEST(ForwardsInThreads, Stage3WithGatherBuffers) {
  forwards_in_threads(3, kOffloadedParameters, true, 10000);
  forwards_in_threads(3, kOffloadedParameters, false, 10000);
  const auto alone = std::string(kOffloadedParameters) + R"(, "stage3_prefetch_bucket_size": 0)";
  forwards_in_threads(3, alone, false, 3000, 4);
}

// Two towers at once, each with its own parameters, then one backward.
TEST(ForwardsInThreads, TwoTowersTrain) {
  struct Towers : torch::nn::Module {
    Towers() : a(register_module("a", small_model(4, 64))), b(register_module("b", small_model(4, 64))) {}
    std::shared_ptr<torch::nn::SequentialImpl> a, b;
  };
  const OneThreadEach one;
  auto model = std::make_shared<Towers>(), plain = std::make_shared<Towers>();
  fill(*model);
  fill(*plain);
  Engine engine(model, small_options(3, kOffloadedParameters), Communicator::local());
  torch::optim::AdamW adam(plain->parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0));
  for (int step = 0; step < 50; ++step) {
    at::Tensor left, right;
    std::string error;
    std::thread other([&] {
      at::set_num_threads(1);
      error = message_of([&] { left = model->a->forward(small_input(step, 64)); });
    });
    right = model->b->forward(small_input(step + 1, 64));
    other.join();
    ASSERT_EQ(error, "");
    engine.backward((left * right).pow(2).mean() + (left - right).pow(2).mean());
    engine.step();
    adam.zero_grad();
    const auto l = plain->a->forward(small_input(step, 64)), r = plain->b->forward(small_input(step + 1, 64));
    ((l * r).pow(2).mean() + (l - r).pow(2).mean()).backward();
    adam.step();
  }
  const auto masters = engine.full_state_dict();
  for (const auto& item : plain->named_parameters())
    EXPECT_LT((masters.at(item.key()) - item.value().detach()).abs().max().item<double>(), 1e-3) << item.key();
}

// A parameter that another thread is reading is neither updated nor resharded: the call is refused.
TEST(ForwardsInThreads, StepDuringAnOperator) {
  auto model = small_model(2, 1024);
  Engine engine(model, small_options(3, kOffloadedParameters), Communicator::local());
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  const auto input = torch::ones({4096, 1024});
  std::thread reader([&] {
    torch::NoGradGuard no_grad;
    while (!stop) {
      const auto error = message_of([&] { model->forward(input); });
      wrong += !error.empty() && !contains(error, "another thread");
    }
  });
  int refused = 0;
  for (int i = 0; i < 20; ++i) {
    const auto error = message_of([&] {
      engine.backward(model->forward(small_input(i, 1024)).pow(2).mean());
      engine.step();
    });
    if (error.empty()) continue;
    EXPECT_TRUE(contains(error, "another thread")) << error;
    ++refused;
    break;
  }
  stop = true;
  reader.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(refused, 1);  // the reader does nothing else
}

// --- metadata only ----------------------------------------------------------------------------

TEST(MetadataOnly, LikeAndNewReadNothing) {
  const std::pair<const char*, std::function<void(const at::Tensor&)>> uses[] = {
      {"zeros_like", [](const at::Tensor& p) { EXPECT_EQ(torch::zeros_like(p).sizes(), p.sizes()); }},
      {"ones_like", [](const at::Tensor& p) { torch::ones_like(p); }},
      {"empty_like", [](const at::Tensor& p) { torch::empty_like(p); }},
      {"full_like",
       [](const at::Tensor& p) { EXPECT_EQ(torch::full_like(p, 3).sum().item<float>(), 3.0f * p.numel()); }},
      {"rand_like", [](const at::Tensor& p) { torch::rand_like(p); }},
      {"randn_like", [](const at::Tensor& p) { torch::randn_like(p); }},
      {"randint_like", [](const at::Tensor& p) { torch::randint_like(p, 5); }},
      {"new_empty", [](const at::Tensor& p) { p.new_empty({3}); }},
      {"new_empty_strided", [](const at::Tensor& p) { p.new_empty_strided({3}, {1}); }},
      {"new_zeros", [](const at::Tensor& p) { p.new_zeros({3}); }},
      {"new_ones", [](const at::Tensor& p) { p.new_ones({3}); }},
      {"new_full", [](const at::Tensor& p) { p.new_full({3}, 2); }},
      {"size", [](const at::Tensor& p) { at::size(p, 0); }},
      {"stride", [](const at::Tensor& p) { at::stride(p, 0); }},
      {"is_same_size", [](const at::Tensor& p) { EXPECT_TRUE(at::is_same_size(p, p)); }},
      {"is_floating_point", [](const at::Tensor& p) { EXPECT_TRUE(at::is_floating_point(p)); }},
      {"result_type", [](const at::Tensor& p) { at::result_type(p, p); }},
      {"view_dtype", [](const at::Tensor& p) { p.detach().view(at::kInt); }},
      {"detach", [](const at::Tensor& p) { p.detach(); }},
      {"t", [](const at::Tensor& p) { p.t(); }},
      {"swapdims", [](const at::Tensor& p) { at::swapdims(p, 0, 1); }},
      {"hsplit", [](const at::Tensor& p) { at::hsplit(p, 2); }},
  };
  for (const auto& transport : {kSharded[0], kSharded[1]})
    each_rank(transport, [&](std::shared_ptr<Communicator> comm) {
      auto model = small_model();
      Engine engine(model, small_options(3, transport.zero), comm);
      const auto weight = model->parameters()[2];
      for (const auto& [name, use] : uses) {
        SCOPED_TRACE(name);
        comm->barrier();
        comm->reset_stats();
        // On one rank only: as a collective it would hang.
        if (comm->rank() == 0) use(weight);
        EXPECT_EQ(comm->stats().by_op["all_gather"].calls, 0u);
        EXPECT_EQ(engine.memory().current(MemoryReport::Tier::Device, MemoryReport::Purpose::GatherBuffers), 0u);
      }
      // And then training.
      engine.backward(model->forward(small_input(0)).pow(2).mean());
      engine.step();
    });
}

// All operators that libtorch names "like" or "new" read no data; the test above covers all of them.
TEST(MetadataOnly, NoneOfTheDispatchersIsForgotten) {
  std::set<std::string> names;
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto& name = op.name;
    if (name.rfind("aten::new_", 0) == 0 || (name.rfind("aten::", 0) == 0 && name.ends_with("_like")))
      names.insert(name.substr(6));
  }
  EXPECT_EQ(names,
            (std::set<std::string>{"empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones",
                                   "new_zeros", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"}));
}

// --- inference mode ---------------------------------------------------------------------------

TEST(InferenceMode, EvaluationBeforeAndAfterAStep) {
  struct Case {
    int stage, world;
    const char* zero;
  };
  const Case cases[] = {{0, 1, ""},
                        {0, 2, ""},
                        {1, 2, ""},
                        {2, 2, ""},
                        {3, 1, ""},
                        {3, 2, ""},
                        {3, 1, kOffloadedParameters},
                        {3, 2, R"(, "stage3_prefetch_bucket_size": 0)"}};
  for (const auto& c : cases)
    each_rank({c.world, c.zero, "inference"}, [&](std::shared_ptr<Communicator> comm) {
      SCOPED_TRACE(c.stage);
      auto model = small_model(4), plain = small_model(4);
      Engine engine(model, small_options(c.stage, c.zero), comm);
      torch::optim::AdamW adam(plain->parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0));
      const auto evaluate = [&](int seed) {
        const c10::InferenceMode inference;
        const auto got = model->forward(small_input(seed)), wanted = plain->forward(small_input(seed));
        EXPECT_LT((got - wanted).abs().max().item<double>(), 1e-4);
      };
      for (int step = 0; step < 4; ++step) {
        evaluate(step);
        engine.backward(model->forward(small_input(step)).pow(2).mean());
        evaluate(step + 1);
        engine.step();
        adam.zero_grad();
        plain->forward(small_input(step)).pow(2).mean().backward();
        adam.step();
        evaluate(step + 2);
        {
          const c10::InferenceMode inference;
          auto scope = engine.gathered_parameters();
          EXPECT_LT((model->parameters()[1] - plain->parameters()[1]).abs().max().item<double>(), 1e-4);
        }
      }
      const auto error = message_of([&] {
        const c10::InferenceMode inference;
        auto loss = model->forward(small_input(0)).pow(2).mean();
        if (comm->size() == 1) engine.backward(loss);
      });
      EXPECT_EQ(contains(error, "requires_grad"), comm->size() == 1) << error;
    });
}

}  // namespace
}  // namespace zero::test::forwards_test
