// The mesh, functions over tensor-parallel groups, the vocabulary-parallel loss and Ulysses' exchanges, against whole
// tensors in one process. Ranks are processes; every rank computes the reference itself.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>
#include <zero/library.h>

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <numeric>

#include "sharding/tensor_cut.h"
#include "support/fork_ranks.h"
#include "support/require.h"
#include "support/shm_ranks.h"

namespace zero::test::parallel_functions_test {
namespace {

at::Tensor draw(std::vector<std::int64_t> sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions());
}

void require_equal(const at::Tensor& got, const at::Tensor& wanted, const std::string& what, double tolerance = 0) {
  require(got.defined() && got.sizes() == wanted.sizes(), what + ": another shape");
  if (got.numel() == 0) return;
  const auto apart = (got.to(at::kDouble) - wanted.to(at::kDouble)).abs().max().item<double>();
  require(tolerance == 0 ? got.equal(wanted) : apart <= tolerance, what + ": apart by " + std::to_string(apart));
}

template <class Body>
void run(int size, const Body& body) {
  EXPECT_EQ(errors_of(with_ranks(size, body)), "");
}

// --- the mesh -----------------------------------------------------------------------------------

Options mesh_options(int sequence, int tensor) {
  return Options::build().train_micro_batch_size(1).sequence_parallel(sequence).tensor_parallel(
      tensor, {.preset_model = "gpt"});
}

std::string ranks_of(Communicator& group, int rank) {
  std::string text;
  for (const auto& r : group.all_gather_bytes(std::to_string(rank))) text += r;
  return text;
}

TEST(MeshOfRanks, CoordinatesAndGroups) {
  run(8, [](const auto& comm) {
    const auto mesh = Mesh::of(mesh_options(2, 2), comm);
    const int r = comm->rank();
    require(mesh->rank("dp") == r / 4 && mesh->rank("sp") == r / 2 % 2 && mesh->rank("tp") == r % 2, "coordinates");
    require(mesh->rank("dp_sp") == r / 2 && mesh->size("dp_sp") == 4, "the flattened dimension");
    const std::string groups[4][8] = {{"01", "01", "23", "23", "45", "45", "67", "67"},
                                      {"02", "13", "02", "13", "46", "57", "46", "57"},
                                      {"04", "15", "26", "37", "04", "15", "26", "37"},
                                      {"0246", "1357", "0246", "1357", "0246", "1357", "0246", "1357"}};
    const char* dims[] = {"tp", "sp", "dp", "dp_sp"};
    for (int d = 0; d < 4; ++d)
      require(ranks_of(*mesh->group(dims[d]), r) == groups[d][r], std::string("the group of ") + dims[d]);
    require(mesh->tokens(7) == (r / 2 % 2 == 0 ? std::pair<std::int64_t, std::int64_t>(0, 3)
                                               : std::pair<std::int64_t, std::int64_t>(3, 7)),
            "tokens");
    if (r == 5)
      require(mesh->text() == "8 ranks = 2 dp x 2 sp x 2 tp; rank 5 is dp 1, sp 0, tp 1", "text: " + mesh->text());
    comm->reset_stats();
    auto ones = at::ones({10});
    mesh->group("tp")->all_reduce(ones)->wait();
    require(comm->stats().by_op.at("tp.all_reduce").bytes_sent == 40, "bytes of tp in the run's statistics");
  });
}

TEST(MeshOfRanks, WithoutParallelismItIsTheWorld) {
  run(2, [](const auto& comm) {
    const auto mesh = Mesh::of(Options::build().train_micro_batch_size(1), comm);
    require(mesh->group("dp") == comm && mesh->group("dp_sp") == comm, "dp is the world");
    require(mesh->size("tp") == 1 && mesh->group("tp")->size() == 1, "tp is one rank");
  });
}

TEST(MeshOfRanks, DegreesThatDoNotDivide) {
  run(3, [](const auto& comm) {
    try {
      Mesh::of(mesh_options(1, 2), comm);
    } catch (const ConfigError& e) {
      require(contains(e.what(), "3 ranks are no multiple of tensor_parallel.autotp_size 2 x sequence_parallel_size 1"),
              e.what());
      comm->barrier();  // stays usable
      return;
    }
    require(false, "expected a ConfigError");
  });
}

// --- functions ----------------------------------------------------------------------------------

std::uint64_t sent(Communicator& group, const char* op) {
  const auto stats = group.stats();
  const auto row = stats.by_op.find(op);
  return row == stats.by_op.end() ? 0 : row->second.bytes_sent;
}

// y's gradient is w; returns x's.
at::Tensor gradient_of(const at::Tensor& x, const at::Tensor& y, const at::Tensor& w) {
  torch::autograd::backward({(y.to(at::kFloat) * w).sum()});
  return x.grad();
}

void check_functions(const std::shared_ptr<Communicator>& group, at::ScalarType dtype, std::int64_t dim,
                     const tp::Lengths& wanted_lengths) {
  const int ranks = group->size(), own = group->rank();
  const auto n = wanted_lengths.empty()
                     ? std::int64_t{4} * ranks
                     : std::accumulate(wanted_lengths.begin(), wanted_lengths.end(), std::int64_t{0});
  std::vector<std::int64_t> sizes{3, 5, 2};
  sizes[static_cast<std::size_t>(dim)] = n;
  const auto begin_of = [&](int j) {
    std::int64_t begin = 0;
    for (int i = 0; i < j; ++i) begin += wanted_lengths.empty() ? 4 : wanted_lengths[static_cast<std::size_t>(i)];
    return begin;
  };
  const auto part = [&](const at::Tensor& x, int j) {
    return x.narrow(dim, begin_of(j), begin_of(j + 1) - begin_of(j)).contiguous();
  };
  // Every rank's whole tensor and gradient; sums by the definition: fp32, in rank order, rounded once.
  std::vector<at::Tensor> x, w;
  for (int j = 0; j < ranks; ++j) {
    x.push_back(draw(sizes, 10 + static_cast<std::uint64_t>(j)).to(dtype));
    w.push_back(draw(sizes, 50 + static_cast<std::uint64_t>(j)).to(dtype));
  }
  const auto sum = [&](const std::vector<at::Tensor>& terms) {
    auto total = terms[0].to(at::kFloat);
    for (int j = 1; j < ranks; ++j) total = total + terms[static_cast<std::size_t>(j)].to(at::kFloat);
    return total.to(dtype);
  };
  const auto at_own = static_cast<std::size_t>(own);
  const auto leaf = [](const at::Tensor& t) { return t.clone().requires_grad_(); };
  const auto fp32 = [](const at::Tensor& t) { return t.to(at::kFloat); };
  const auto X = static_cast<std::uint64_t>(x[0].nbytes());
  const auto f = [&](std::uint64_t bytes) {
    return bytes * static_cast<std::uint64_t>(ranks - 1) / static_cast<std::uint64_t>(ranks);
  };
  group->reset_stats();

  auto in = leaf(x[0]);
  auto out = tp::copy(in, group);
  require_equal(out.detach(), x[0], "copy");
  require_equal(gradient_of(in, out, fp32(w[at_own])), sum(w), "gradient of copy");
  require(sent(*group, "all_reduce") == f(2 * X), "bytes of copy");

  in = leaf(x[at_own]);
  out = tp::reduce(in, group);
  require_equal(out.detach(), sum(x), "reduce");
  require_equal(gradient_of(in, out, fp32(w[0])), w[0], "gradient of reduce");
  require(sent(*group, "all_reduce") == 2 * f(2 * X), "bytes of reduce");

  in = leaf(x[0].transpose(0, 2).contiguous().transpose(0, 2));  // other strides
  out = tp::scatter(in, group, dim, wanted_lengths);
  require_equal(out.detach(), part(x[0], own), "scatter");
  require_equal(gradient_of(in, out, fp32(part(w[0], own))), w[0], "gradient of scatter");

  in = leaf(part(x[0], own));
  out = tp::gather(in, group, dim - 3, wanted_lengths);
  require_equal(out.detach(), x[0], "gather");
  require_equal(gradient_of(in, out, fp32(w[0])), part(w[0], own), "gradient of gather");

  in = leaf(part(x[0], own));
  out = tp::gather_split(in, group, dim, wanted_lengths);
  require_equal(out.detach(), x[0], "gather_split");
  require_equal(gradient_of(in, out, fp32(w[at_own])), part(sum(w), own), "gradient of gather_split");

  group->reset_stats();
  in = leaf(x[at_own]);
  out = tp::reduce_scatter(in, group, dim, wanted_lengths);
  require_equal(out.detach(), part(sum(x), own), "reduce_scatter");
  require_equal(gradient_of(in, out, fp32(part(w[0], own))), w[0], "gradient of reduce_scatter");
  const auto mine = static_cast<std::uint64_t>(part(x[0], own).nbytes());
  if (wanted_lengths.empty())
    require(sent(*group, "reduce_scatter") == f(X) && sent(*group, "all_gather") == f(X), "bytes of reduce_scatter");
  else  // parts of other ranks are sent; then the own part to all others
    require(sent(*group, "all_to_all") == X - mine + mine * static_cast<std::uint64_t>(ranks - 1),
            "bytes of an uneven reduce_scatter");
}

TEST(TensorParallelFunctions, EqualWholeTensors) {
  for (const int ranks : {2, 3})
    run(ranks, [ranks](const auto& comm) {
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
        for (const std::int64_t dim : {0, 1, 2}) {
          check_functions(comm, dtype, dim, {});
          check_functions(comm, dtype, dim, ranks == 2 ? tp::Lengths{3, 4} : tp::Lengths{2, 0, 5});
        }
    });
}

TEST(TensorParallelFunctions, WrongArguments) {
  run(2, [](const auto& comm) {
    const auto expect = [&](const std::string& words, const auto& call) {
      try {
        call();
      } catch (const ConfigError& e) {
        return require(contains(e.what(), words), e.what());
      }
      require(false, "expected a ConfigError with: " + words);
    };
    const auto x = at::zeros({4, 3}).requires_grad_();
    expect("got dim 2", [&] { tp::gather(x, comm, 2); });
    expect("expected one for each of 2 ranks", [&] { tp::scatter(x, comm, 0, {4}); });
    expect("expected 5 elements along dim 0", [&] { tp::scatter(x, comm, 0, {2, 3}); });
    expect("differentiable once",
           [&] { torch::autograd::grad({tp::reduce(x, comm).sum()}, {x}, {}, c10::nullopt, /*create_graph=*/true); });
  });
}

// --- the loss -----------------------------------------------------------------------------------

void check_loss(const std::shared_ptr<Communicator>& group, std::int64_t vocabulary, double scale, double smoothing,
                at::ScalarType dtype) {
  const std::int64_t rows = 37;
  const auto whole = (draw({rows, vocabulary}, 3) * scale).to(dtype);
  auto targets = at::randint(0, vocabulary, {rows}, at::detail::createCPUGenerator(4), at::kLong);
  targets.narrow(0, 5, 4).fill_(-100);
  const auto range = sharding::cut_range(vocabulary, 1, group->rank(), group->size());
  auto own = whole.narrow(1, range.begin, range.numel()).clone().requires_grad_();
  group->reset_stats();
  const auto loss = tp::cross_entropy(own, targets, group, {.label_smoothing = smoothing, .vocabulary = vocabulary});
  require(
      sent(*group, "all_gather") == static_cast<std::uint64_t>((group->size() - 1) * (smoothing > 0 ? 16 : 12) * rows),
      "bytes of the loss");
  (loss * 3.0).backward();
  auto reference = whole.to(at::kDouble).requires_grad_();
  const double torchs = smoothing * static_cast<double>(vocabulary) / static_cast<double>(vocabulary - 1);
  const auto wanted = torch::nn::functional::cross_entropy(
      reference, targets, torch::nn::functional::CrossEntropyFuncOptions().label_smoothing(smoothing > 0 ? torchs : 0));
  (wanted * 3.0).backward();
  require(std::abs(loss.template item<double>() - wanted.template item<double>()) <=
              2e-6 * std::max(1.0, std::abs(wanted.template item<double>())),
          "loss " + std::to_string(loss.template item<double>()) + ", expected " +
              std::to_string(wanted.template item<double>()));
  require_equal(own.grad().to(at::kDouble), reference.grad().narrow(1, range.begin, range.numel()), "gradient",
                dtype == at::kFloat ? 1e-6 : 1e-3);
}

TEST(VocabularyParallelLoss, EqualsTorchInDouble) {
  for (const int ranks : {1, 2, 3, 4})
    run(ranks, [](const auto& comm) {
      for (const double smoothing : {0.0, 0.1})
        for (const double scale : {1.0, 300.0}) {
          check_loss(comm, 11, scale, smoothing, at::kFloat);
          check_loss(comm, 12, scale, smoothing, at::kBFloat16);
        }
    });
}

// A micro-batch of masked samples must not spoil the gradients of the step's others.
TEST(VocabularyParallelLoss, WithoutARowThatCountsTheGradientIsZero) {
  run(2, [](const auto& comm) {
    for (const double smoothing : {0.0, 0.1})
      for (const std::int64_t rows : {0, 3}) {
        auto own = draw({rows, 4}, 3).requires_grad_();
        const auto loss =
            tp::cross_entropy(own, at::full({rows}, -100, at::kLong), comm, {.label_smoothing = smoothing});
        require(std::isnan(loss.template item<double>()), "a loss of no row that is no NaN");
        loss.backward();
        require_equal(own.grad(), at::zeros_like(own), "the gradient of rows that do not count");
      }
  });
  run(1, [](const auto& comm) {  // no other class to smooth over
    auto own = draw({3, 1}, 3).requires_grad_();
    const auto loss = tp::cross_entropy(own, at::zeros({3}, at::kLong), comm, {.label_smoothing = 0.1});
    loss.backward();
    require(loss.template item<double>() == 0, "the loss of the only class");
    require_equal(own.grad(), at::zeros_like(own), "the gradient of the only class");
  });
}

TEST(VocabularyParallelLoss, Values) {
  run(2, [](const auto& comm) {
    const auto whole = at::tensor({1.0F, 2.0F, 0.5F, -1.0F}).view({1, 4});
    const auto own = whole.narrow(1, 2 * comm->rank(), 2);
    const auto target = at::tensor({2}, at::kLong);
    const double plain = tp::cross_entropy(own, target, comm).template item<double>(),
                 smooth = tp::cross_entropy(own, target, comm, {.label_smoothing = 0.1}).template item<double>();
    require(std::abs(plain - 1.995181898085856) < 1e-6, std::to_string(plain));
    require(std::abs(smooth - 1.978515231419189) < 1e-6, std::to_string(smooth));
  });
}

// --- Ulysses ------------------------------------------------------------------------------------

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto heads = [&](const at::Tensor& x) { return x.transpose(1, 2).repeat_interleave(q.size(2) / x.size(2), 1); };
  return at::scaled_dot_product_attention(heads(q), heads(k), heads(v), {}, 0, /*is_causal=*/true).transpose(1, 2);
}

void check_attention(const std::shared_ptr<Communicator>& comm, std::int64_t s, std::int64_t heads, std::int64_t kv,
                     at::ScalarType dtype) {
  const auto mesh = Mesh::of(Options::build().train_micro_batch_size(1).sequence_parallel(comm->size()), comm);
  const std::int64_t b = 2, d = 4;
  const auto [begin, end] = mesh->tokens(s);
  std::vector<at::Tensor> whole, own;
  for (int i = 0; i < 3; ++i) {
    whole.push_back(
        draw({b, s, i == 0 ? heads : kv, d}, 20 + static_cast<std::uint64_t>(i)).to(dtype).requires_grad_());
    own.push_back(whole.back().detach().narrow(1, begin, end - begin).clone().requires_grad_());
  }
  const auto w = draw({b, s, heads, d}, 30);
  const auto wanted = attention(whole[0], whole[1], whole[2]);
  (wanted.to(at::kFloat) * w).sum().backward();
  const auto got = attention_over_heads(*mesh, own[0], own[1], own[2], attention, s);
  (got.to(at::kFloat) * w.narrow(1, begin, end - begin)).sum().backward();
  const auto label = "s " + std::to_string(s) + " heads " + std::to_string(heads) + "/" + std::to_string(kv) + " ";
  const auto mine = [&](const at::Tensor& x) { return x.detach().narrow(1, begin, end - begin); };
  // Each head is computed by the same operations on the same numbers.
  require_equal(got.detach(), mine(wanted), label + "output");
  require_equal(own[0].grad(), mine(whole[0].grad()), label + "gradient of q");
  for (int i : {1, 2})
    require_equal(own[static_cast<std::size_t>(i)].grad(), mine(whole[static_cast<std::size_t>(i)].grad()),
                  label + "gradient of k or v",
                  kv == heads           ? 0
                  : dtype == at::kFloat ? 1e-5
                                        : 5e-2);
}

TEST(Ulysses, EqualsAttentionOfOneRank) {
  for (const int ranks : {2, 3, 4})
    run(ranks, [](const auto& comm) {
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        check_attention(comm, 12, 12, 12, dtype);
        check_attention(comm, 13, 7, 7, dtype);
        check_attention(comm, 9, 8, 4, dtype);
        check_attention(comm, 10, 8, 2, dtype);
        check_attention(comm, 5, 6, 1, dtype);
      }
    });
}

void check_volume(int ranks, std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t a, std::int64_t kv,
                  std::uint64_t bytes) {
  run(ranks, [=](const auto& comm) {
    const auto mesh = Mesh::of(Options::build().train_micro_batch_size(1).sequence_parallel(ranks), comm);
    const auto of = [&](std::int64_t n) { return at::zeros({b, s / ranks, n, h / a}); };
    comm->reset_stats();
    attention_over_heads(*mesh, of(a), of(kv), of(kv), attention);
    const auto got = sent(*comm, "all_to_all");
    require(got == bytes, "sent " + std::to_string(got) + ", expected " + std::to_string(bytes));
    require(comm->stats().control.calls == 0, "control messages");
  });
}

TEST(Ulysses, Volume) {
  check_volume(2, 2, 64, 32, 4, 4, 16384);
  check_volume(4, 2, 64, 32, 4, 4, 12288);
  check_volume(4, 1, 64, 56, 7, 7, 10752);
  check_volume(2, 1, 64, 64, 8, 2, 10240);
}

TEST(Ulysses, WrongShapes) {
  run(2, [](const auto& comm) {
    const auto mesh = Mesh::of(Options::build().train_micro_batch_size(1).sequence_parallel(2), comm);
    const auto expect = [&](const std::string& words, const auto& call) {
      try {
        call();
      } catch (const ConfigError& e) {
        return require(contains(e.what(), words), e.what());
      }
      require(false, "expected a ConfigError with: " + words);
    };
    const auto of = [](std::int64_t tokens, std::int64_t heads) { return at::zeros({1, tokens, heads, 4}); };
    expect("got 1 heads for 2 sequence-parallel ranks", [&] { sequence_to_heads(of(4, 1), *mesh); });
    expect("mesh.tokens(9) is", [&] { sequence_to_heads(of(3, 2), *mesh, 9); });
    expect("expected [batch, tokens, heads, width]", [&] { sequence_to_heads(at::zeros({4, 2}), *mesh); });
    expect("expected a divisor", [&] { sequence_to_heads(of(4, 4), of(4, 3), of(4, 3), *mesh); });
    comm->barrier();
  });
}

}  // namespace
}  // namespace zero::test::parallel_functions_test
