#include "support/collective_checks.h"

#include <torch/types.h>

#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <zero/errors.h>

#include "comm/group.h"

namespace zero::test {
namespace {

using Comm = std::shared_ptr<Communicator>;

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

std::string who(const Comm& comm) {
  return "rank " + std::to_string(comm->rank()) + "/" + std::to_string(comm->size()) + " over " + comm->transport();
}

// Steele, Lea and Flood's SplitMix64. The data of all collectives comes from it, also under the thread sanitizer, where
// the standard library's generators take most of the tests' time.
class Bits {
 public:
  explicit Bits(std::uint64_t seed) : state_(seed) {}
  std::uint64_t operator()() {
    auto z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  std::uint64_t state_;
};

// The data of `rank` for `key`: any bit pattern for types that are only moved; for summed types, values of very
// different size, so that another order of sums or an early rounding is detected.
at::Tensor data_of(std::uint64_t key, int rank, std::int64_t numel, at::ScalarType dtype) {
  Bits bits(key * 1000003 + static_cast<std::uint64_t>(rank) * 7919 + 17);
  if (dtype == at::kByte || dtype == at::kLong || dtype == at::kDouble) {
    auto data = at::empty({numel}, dtype);
    auto* bytes = static_cast<unsigned char*>(data.mutable_data_ptr());
    for (std::size_t i = 0, n = data.nbytes(); i < n; ++i) bytes[i] = static_cast<unsigned char>(bits() >> 32);
    return data;
  }
  auto data = at::empty({numel}, at::kFloat);
  auto* values = data.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < numel; ++i) {
    const auto b = bits();
    const float mantissa = static_cast<float>(static_cast<std::int32_t>(b >> 32)) / 2147483648.0f;
    values[i] = mantissa * static_cast<float>(1 << b % 14) / 64;
  }
  return data.to(dtype);
}

at::Tensor part_of(const at::Tensor& whole, int rank, int size) {
  const auto numel = whole.numel() / size;
  return whole.narrow(0, rank * numel, numel);
}

at::Tensor gathered(std::uint64_t key, int size, std::int64_t numel, at::ScalarType dtype) {
  std::vector<at::Tensor> parts;
  for (int r = 0; r < size; ++r) parts.push_back(data_of(key, r, numel, dtype));
  return at::cat(parts);
}

at::Tensor summed(std::uint64_t key, int size, std::int64_t numel, at::ScalarType dtype) {
  std::vector<float> sum(static_cast<std::size_t>(numel));
  for (int r = 0; r < size; ++r) {
    const auto part = data_of(key, r, numel, dtype).to(at::kFloat);
    const auto* values = part.const_data_ptr<float>();
    for (std::int64_t i = 0; i < numel; ++i) {
      auto& s = sum[static_cast<std::size_t>(i)];
      s = r == 0 ? values[i] : s + values[i];
    }
  }
  return at::from_blob(sum.data(), {numel}, at::kFloat).to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

at::Tensor transposed(std::uint64_t key, int rank, int size, std::int64_t numel, at::ScalarType dtype) {
  std::vector<at::Tensor> parts;
  for (int r = 0; r < size; ++r) parts.push_back(part_of(data_of(key, r, numel, dtype), rank, size));
  return at::cat(parts);
}

// An all_to_all whose parts differ in size, some of them empty: elements from one rank to another.
std::int64_t part_numel(std::uint64_t key, int from, int to, std::int64_t numel) {
  return numel *
         static_cast<std::int64_t>((key + 3 * static_cast<std::uint64_t>(from) + static_cast<std::uint64_t>(to)) % 4) /
         2;
}
std::vector<std::int64_t> sent_numels(std::uint64_t key, int from, int size, std::int64_t numel) {
  std::vector<std::int64_t> numels;
  for (int to = 0; to < size; ++to) numels.push_back(part_numel(key, from, to, numel));
  return numels;
}
std::vector<std::int64_t> received_numels(std::uint64_t key, int to, int size, std::int64_t numel) {
  std::vector<std::int64_t> numels;
  for (int from = 0; from < size; ++from) numels.push_back(part_numel(key, from, to, numel));
  return numels;
}
std::int64_t total(const std::vector<std::int64_t>& numels, int count) {
  return std::accumulate(numels.begin(), numels.begin() + count, std::int64_t{0});
}

at::Tensor transposed_parts(std::uint64_t key, int rank, int size, std::int64_t numel, at::ScalarType dtype) {
  std::vector<at::Tensor> parts;
  for (int r = 0; r < size; ++r) {
    const auto numels = sent_numels(key, r, size, numel);
    parts.push_back(data_of(key, r, total(numels, size), dtype)
                        .narrow(0, total(numels, rank), numels[static_cast<std::size_t>(rank)]));
  }
  return at::cat(parts);
}

// In memory of any device, such as nccl's allocate() returns.
void fill_bytes(const at::Tensor& memory, int byte) {
  if (memory.numel() == 0) return;
  auto host = at::empty(memory.sizes(), memory.scalar_type());
  std::memset(host.mutable_data_ptr(), byte, host.nbytes());
  memory.copy_(host);
}

// Bit by bit.
void require_same(const at::Tensor& result, const at::Tensor& expected, const std::string& what) {
  const auto got = result.cpu();
  require(got.scalar_type() == expected.scalar_type() && got.numel() == expected.numel(), what,
          ": another shape or dtype");
  const auto* a = static_cast<const char*>(got.const_data_ptr());
  const auto* b = static_cast<const char*>(expected.const_data_ptr());
  if (got.numel() == 0 || std::memcmp(a, b, got.nbytes()) == 0) return;
  for (std::size_t i = 0; i < got.nbytes(); i += got.itemsize()) {
    if (std::memcmp(a + i, b + i, got.itemsize()) == 0) continue;
    const auto index = static_cast<std::int64_t>(i / got.itemsize());
    require(false, what, ": element ", index, " of ", got.numel(), " (", c10::toString(got.scalar_type()), ") is ",
            got[index].to(at::kDouble).item<double>(), ", expected ", expected[index].to(at::kDouble).item<double>());
  }
}

const std::vector<std::string> kOps{"all_gather", "reduce_scatter", "all_reduce",
                                    "broadcast",  "all_to_all",     "all_to_all of given parts"};

// One collective in flight, and what it must give.
struct Running {
  std::string what;
  at::Tensor out, in, expected, in_expected;
  std::shared_ptr<Work> work;

  void finish(bool overwrite) {
    work->wait();
    require(work->done(), what, ": not done after wait()");
    work->wait();  // again: nothing happens
    require_same(out, expected, what);
    if (in_expected.defined()) require_same(in, in_expected, what + ", input");
    if (overwrite && in.defined()) fill_bytes(in, 0x5a);
    if (overwrite) fill_bytes(out, 0xa5);
  }
};

bool sums(const std::string& op) { return op == "reduce_scatter" || op == "all_reduce"; }

// `numel` is of one rank's part (for all_reduce and broadcast, of the tensor).
Running begin(const Comm& comm, const std::string& op, std::uint64_t key, std::int64_t numel, at::ScalarType dtype,
              bool allocated, int root = 0) {
  const int size = comm->size(), rank = comm->rank();
  const auto tensor = [&](std::int64_t n) {
    auto memory = allocated ? comm->allocate(n, dtype) : at::empty({n}, dtype);
    require(memory.numel() == n && memory.scalar_type() == dtype && memory.is_contiguous(), who(comm), ": allocate(", n,
            ") is of another shape");
    fill_bytes(memory, 0xc3);
    return memory;
  };
  const auto filled = [&](std::int64_t n) {
    auto memory = tensor(n);
    memory.copy_(data_of(key, rank, n, dtype));
    return memory;
  };
  Running run;
  std::ostringstream what;
  what << who(comm) << ": " << op << "(" << c10::toString(dtype) << ", " << numel << (allocated ? ", allocated" : "")
       << ", key " << key << ")";
  run.what = what.str();
  if (op == "all_gather") {
    run.in = filled(numel);
    run.out = tensor(numel * size);
    run.expected = gathered(key, size, numel, dtype);
    run.work = comm->all_gather(run.out, run.in);
  } else if (op == "reduce_scatter") {
    run.in = filled(numel * size);
    run.out = tensor(numel);
    run.expected = part_of(summed(key, size, numel * size, dtype), rank, size).clone();
    run.work = comm->reduce_scatter(run.out, run.in);
  } else if (op == "all_reduce") {
    run.out = filled(numel);
    run.expected = summed(key, size, numel, dtype);
    run.work = comm->all_reduce(run.out);
  } else if (op == "broadcast") {
    run.out = filled(numel);
    run.expected = data_of(key, root, numel, dtype);
    run.work = comm->broadcast(run.out, root);
  } else if (op == "all_to_all") {
    run.in = filled(numel * size);
    run.out = tensor(numel * size);
    run.expected = transposed(key, rank, size, numel * size, dtype);
    run.work = comm->all_to_all(run.out, run.in);
  } else {
    const auto sent = sent_numels(key, rank, size, numel), received = received_numels(key, rank, size, numel);
    run.in = filled(total(sent, size));
    run.out = tensor(total(received, size));
    run.expected = transposed_parts(key, rank, size, numel, dtype);
    run.work = comm->all_to_all(run.out, run.in, received, sent);
  }
  if (run.in.defined()) run.in_expected = data_of(key, rank, run.in.numel(), dtype);
  return run;
}

std::vector<at::ScalarType> dtypes_of(const std::string& op) {
  std::vector<at::ScalarType> dtypes{at::kFloat, at::kBFloat16, at::kHalf};
  if (sums(op)) return dtypes;
  dtypes.push_back(at::kByte);
  dtypes.push_back(at::kLong);
  return dtypes;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

}  // namespace

void check_values(const Comm& comm) {
  std::uint64_t key = 1;
  for (const auto& op : kOps) {
    for (const auto dtype : dtypes_of(op)) {
      for (const std::int64_t numel : {0, 1, 7, 1000, 65537}) {
        const int roots = op == "broadcast" ? comm->size() : 1;
        for (int root = 0; root < roots; ++root)
          begin(comm, op, ++key, numel, dtype, numel % 2 == 0, root).finish(true);
      }
    }
  }
  // Larger than any staging area or socket buffer is likely to be.
  begin(comm, "all_gather", ++key, 3000001, at::kBFloat16, false).finish(true);
  begin(comm, "reduce_scatter", ++key, 1000003, at::kFloat, true).finish(true);
  begin(comm, "all_reduce", ++key, 3000017, at::kBFloat16, false).finish(true);
  begin(comm, "broadcast", ++key, 5000011, at::kByte, true, comm->size() - 1).finish(true);
  begin(comm, "all_to_all", ++key, 1000003, at::kHalf, false).finish(true);
  begin(comm, "all_to_all of given parts", ++key, 1000003, at::kHalf, true).finish(true);
}

void check_aliasing(const Comm& comm) {
  const int size = comm->size(), rank = comm->rank();
  for (const bool allocated : {false, true}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const std::int64_t numel : {1, 33, 4099}) {
        const auto key = static_cast<std::uint64_t>(numel) + 100000;
        const auto fresh = [&](std::int64_t n) { return allocated ? comm->allocate(n, dtype) : at::empty({n}, dtype); };
        const auto what = who(comm) + ": aliased, " + std::to_string(numel);

        auto out = fresh(numel * size);
        part_of(out, rank, size).copy_(data_of(key, rank, numel, dtype));
        comm->all_gather(out, part_of(out, rank, size))->wait();
        require_same(out, gathered(key, size, numel, dtype), what + " all_gather");

        auto in = fresh(numel * size);
        in.copy_(data_of(key, rank, numel * size, dtype));
        comm->reduce_scatter(part_of(in, rank, size), in)->wait();
        auto expected = data_of(key, rank, numel * size, dtype);
        part_of(expected, rank, size).copy_(part_of(summed(key, size, numel * size, dtype), rank, size));
        require_same(in, expected, what + " reduce_scatter");
      }
    }
  }
}

void check_in_flight(const Comm& comm) {
  std::uint64_t key = 200000;
  for (const auto& first : kOps) {
    for (const auto& second : kOps) {
      for (const bool reversed : {false, true}) {
        // Uneven sizes, and ranks that disagree on the order of their waits.
        key += 2;
        auto a = begin(comm, first, key, 1023, at::kFloat, key % 4 == 0);
        auto b = begin(comm, second, key + 1, 4096 * 3, at::kBFloat16, key % 4 == 2);
        const bool b_first = reversed != (comm->rank() % 2 == 1);
        (b_first ? b : a).finish(true);
        (b_first ? a : b).finish(true);
      }
    }
  }
  std::vector<Running> many;
  for (int i = 0; i < 8; ++i)
    many.push_back(begin(comm, kOps[static_cast<std::size_t>(i) % 2], ++key, 100 + i, at::kHalf, true));
  for (int i = 7; i >= 0; --i) many[static_cast<std::size_t>(i)].finish(true);
}

void check_random_program(const Comm& comm, std::uint64_t seed, int rounds) {
  std::mt19937_64 common(seed), own(seed * 31 + static_cast<std::uint64_t>(comm->rank()));
  std::vector<Running> flying;
  const auto finish_one = [&] {
    const auto i = static_cast<std::size_t>(own() % flying.size());
    flying[i].finish(own() % 2 == 0);
    flying.erase(flying.begin() + static_cast<std::ptrdiff_t>(i));
  };
  for (int round = 0; round < rounds; ++round) {
    const auto& op = kOps[common() % kOps.size()];
    const auto dtypes = dtypes_of(op);
    const auto dtype = dtypes[common() % dtypes.size()];
    const auto numel = static_cast<std::int64_t>(common() % (common() % 4 == 0 ? 20000 : 200));
    const int root = static_cast<int>(common() % static_cast<std::uint64_t>(comm->size()));
    const bool allocated = common() % 2 == 0;
    if (common() % 8 == 0) comm->barrier();
    flying.push_back(begin(comm, op, seed * 1000 + static_cast<std::uint64_t>(round), numel, dtype, allocated, root));
    while (flying.size() > common() % 4) finish_one();
  }
  while (!flying.empty()) finish_one();
}

void check_quantized(const Comm& comm) {
  const int size = comm->size(), rank = comm->rank();
  std::uint64_t key = 9000;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int bits : {8, 4}) {
      for (const std::int64_t numel : {0, 1, 257, 5000}) {
        ++key;
        auto in = data_of(key, rank, numel * size, dtype), other = in.clone(), out = at::empty({numel}, dtype);
        const auto exact = part_of(summed(key, size, numel * size, at::kFloat), rank, size);
        // Values of data_of are below 256 in size: a part is off by half a scale of 256 / 127 or 256 / 7, and a
        // sum of ranks that share memory travels as one part of their number's size.
        const double bound = comm::group_of(*comm)->quantizes() ? size * 256.0 / (bits == 8 ? 127 : 7) * 0.51 : 0;
        auto first = comm::group_of(*comm)->reduce_scatter_quantized(out, in, bits);
        auto second = comm::group_of(*comm)->reduce_scatter_quantized(part_of(other, rank, size), other, bits);
        second->wait();
        first->wait();
        require_same(part_of(other, rank, size), out.cpu(), who(comm) + ": quantised sum in place");
        if (numel == 0) continue;
        const auto rounding = dtype == at::kFloat ? 1e-3 : 256.0 * size / 128;
        const auto error = (out.to(at::kFloat) - exact).abs().max().item<double>();
        require(error <= bound + rounding, who(comm), ": quantised sum of ", numel, " off by ", error);
        require(!comm::group_of(*comm)->quantizes() || numel < 5000 || error > 0, who(comm), ": nothing was quantised");
      }
    }
  }
  if (size == 1) return;
  auto in = at::ones({600 * size});
  if (rank == 0) in.fill_(std::numeric_limits<float>::infinity());
  auto out = at::empty({600});
  comm::group_of(*comm)->reduce_scatter_quantized(out, in, 4)->wait();
  require(!out.isfinite().any().item<bool>(), who(comm), ": an overflow became finite");
}

void check_exchange(const Comm& comm) {
  const auto message = [](int rank, std::size_t length) {
    std::string text(length, '\0');
    for (std::size_t i = 0; i < length; ++i) text[i] = static_cast<char>(i * 31 + static_cast<std::size_t>(rank) * 7);
    return text;
  };
  for (const std::size_t length : {0, 1, 8, 1000, 100000, 3000000}) {
    // Lengths differ between ranks, one of them is empty.
    const auto length_of = [&](int rank) { return rank == 1 ? 0 : length + static_cast<std::size_t>(rank) * 3; };
    const auto got = comm->all_gather_bytes(message(comm->rank(), length_of(comm->rank())));
    require(got.size() == static_cast<std::size_t>(comm->size()), who(comm), ": exchange gave ", got.size(),
            " messages");
    for (int r = 0; r < comm->size(); ++r)
      require(got[static_cast<std::size_t>(r)] == message(r, length_of(r)), who(comm), ": exchange of ", length,
              ": the message of rank ", r, " differs");
  }
  comm->barrier();
}

void check_counts(const Comm& comm) {
  const auto n = static_cast<std::uint64_t>(comm->size());
  comm->reset_stats();
  require(comm->stats().by_op.empty() && comm->stats().control.calls == 0, who(comm), ": counts after reset_stats");
  for (int i = 0; i < 3; ++i) {
    begin(comm, "all_gather", 300, 100, at::kBFloat16, true).finish(true);
    begin(comm, "reduce_scatter", 301, 50, at::kFloat, true).finish(true);
    begin(comm, "all_reduce", 302, 60, at::kFloat, true).finish(true);
    begin(comm, "broadcast", 303, 120, at::kByte, true).finish(true);
    begin(comm, "all_to_all", 304, 10, at::kLong, true).finish(true);
  }
  begin(comm, "all_to_all of given parts", 305, 6, at::kLong, true).finish(true);
  const auto numels = sent_numels(305, comm->rank(), comm->size(), 6);
  const auto given =
      8 * static_cast<std::uint64_t>(total(numels, comm->size()) - numels[static_cast<std::size_t>(comm->rank())]);
  comm->all_gather_bytes(std::string(11, 'x'));
  comm->barrier();
  const auto stats = comm->stats();
  // 60 is divisible by every world size in use, so that rounding hides no mistake.
  const std::map<std::string, std::uint64_t> bytes{{"all_gather", (n - 1) * 200},
                                                   {"reduce_scatter", (n - 1) * 200},
                                                   {"all_reduce", 2 * (n - 1) * 240 / n},
                                                   {"broadcast", (n - 1) * 120 / n},
                                                   {"all_to_all", (n - 1) * 80}};
  std::uint64_t all = 0;
  for (const auto& [op, bytes_of_call] : bytes) {
    const auto row = stats.by_op.at(op);
    const bool to_all = op == "all_to_all";
    const std::uint64_t calls = to_all ? 4 : 3, expected = 3 * bytes_of_call + (to_all ? given : 0);
    require(row.calls == calls && row.bytes_sent == expected, who(comm), ": ", op, " counted ", row.calls, " calls, ",
            row.bytes_sent, " bytes, expected ", calls, " and ", expected);
    all += row.bytes_sent;
  }
  require(stats.by_op.size() == bytes.size() && stats.bytes_sent() == all, who(comm), ": total of ", stats.bytes_sent(),
          ", expected ", all);
  require(stats.control.calls == 2 && stats.control.bytes_sent == 11 * (n - 1), who(comm), ": control counted ",
          stats.control.calls, " calls, ", stats.control.bytes_sent, " bytes");
}

void check_arguments(const Comm& comm) {
  const std::int64_t n = comm->size();
  const auto f = [](std::int64_t numel) { return at::zeros({numel}); };
  const auto refused = [&](const std::string& part, const std::function<void()>& call) {
    const auto text = error_of(call);
    require(text.find(part) != std::string::npos &&
                text.find("(rank " + std::to_string(comm->rank()) + "/") != std::string::npos,
            who(comm), ": expected a ConfigError with '", part, "', got '", text, "'");
  };
  refused("[Communicator::all_gather] got an undefined", [&] { comm->all_gather(f(n), at::Tensor()); });
  refused("shape [1, 4]", [&] { comm->all_reduce(at::zeros({1, 4})); });
  refused("not contiguous", [&] { comm->all_reduce(f(8).slice(0, 0, 8, 2)); });
  refused("expected " + std::to_string(5 * n), [&] { comm->all_gather(f(5 * n + 1), f(5)); });
  refused("expected " + std::to_string(5 * n), [&] { comm->reduce_scatter(f(5), f(5 * n - 1)); });
  refused("`in` of dtype bf16, expected fp32", [&] { comm->all_gather(f(n), at::zeros({1}, at::kBFloat16)); });
  refused("dtype Long, expected fp32, bf16 or fp16", [&] { comm->all_reduce(at::zeros({3}, at::kLong)); });
  refused("root " + std::to_string(n), [&] { comm->broadcast(f(3), static_cast<int>(n)); });
  refused("root -1", [&] { comm->broadcast(f(3), -1); });
  auto whole = f(4 * n + 1);
  refused("overlap", [&] { comm->all_gather(whole.narrow(0, 0, 4 * n), whole.narrow(0, 4 * comm->rank() + 1, 4)); });
  refused("overlap",
          [&] { comm->reduce_scatter(whole.narrow(0, 4 * comm->rank() + 1, 4), whole.narrow(0, 0, 4 * n)); });
  refused("overlap", [&] { comm->all_to_all(whole.narrow(0, 0, n), whole.narrow(0, 0, n)); });
  auto released = f(16);
  released.storage().unsafeGetStorageImpl()->set_nbytes(0);
  refused("released", [&] { comm->all_reduce(released); });
  if (n > 1) refused("a multiple of", [&] { comm->all_to_all(f(n + 1), f(n + 1)); });
  const std::vector<std::int64_t> ones(static_cast<std::size_t>(n), 1), more(static_cast<std::size_t>(n) + 1, 1);
  auto negative = ones, other = ones;
  negative[0] = -1;
  other[static_cast<std::size_t>(comm->rank())] = 3;
  refused("numbers in `out_numels`, expected " + std::to_string(n), [&] { comm->all_to_all(f(n), f(n), more, ones); });
  refused("-1 elements in `in_numels`", [&] { comm->all_to_all(f(n), f(n), ones, negative); });
  refused("`in` of " + std::to_string(n + 1) + " elements, expected " + std::to_string(n),
          [&] { comm->all_to_all(f(n), f(n + 1), ones, ones); });
  refused("3 elements from this rank to itself", [&] { comm->all_to_all(f(n), f(n + 2), ones, other); });
  refused("overlap", [&] { comm->all_to_all(whole.narrow(0, 0, n), whole.narrow(0, 0, n), ones, ones); });
  refused("-1 elements", [&] { comm->allocate(-1, at::kFloat); });
  refused("more than 0", [&] { comm->set_timeout(std::chrono::milliseconds(0)); });
  // One element per rank, to check that a rank whose call was refused is still synchronized.
  begin(comm, "all_reduce", 400, 9, at::kFloat, false).finish(false);
}

void check_all(const Comm& comm) {
  check_arguments(comm);
  check_quantized(comm);
  check_exchange(comm);
  check_counts(comm);
  check_aliasing(comm);
  check_values(comm);
  check_in_flight(comm);
  check_random_program(comm, 5, 60);
}

namespace {

// Waits for an operation that cannot complete, and checks the error's rank and text.
void require_failure(const Comm& comm, int rank, const std::string& text) {
  for (int again = 0; again < 2; ++again) {
    std::string got = "no error";
    int blamed = -2;
    try {
      auto tensor = at::ones({64});
      comm->all_reduce(tensor)->wait();
    } catch (const CommError& e) {
      got = e.what();
      blamed = e.rank();
    }
    require(blamed == rank && got.find(text) != std::string::npos, who(comm), ": expected a CommError of rank ", rank,
            " with '", text, "', got '", got, "' of rank ", blamed, again ? ", in a later call" : "");
  }
}

}  // namespace

void check_parts_differ(const Comm& comm) {
  const auto size = static_cast<std::size_t>(comm->size());
  std::vector<std::int64_t> sent(size, 2), expected(size, 2);
  if (comm->rank() == 0) sent[1] = 3;
  if (comm->rank() == 1) expected[0] = 4;
  try {
    comm->all_to_all(at::empty({total(expected, comm->size())}), at::ones({total(sent, comm->size())}), expected, sent)
        ->wait();
    require(comm->rank() != 1, who(comm), ": took a part of another size");
  } catch (const CommError&) {  // the next call throws it again
  }
  require_failure(comm, -1, "which expects 4");
  require_failure(comm, -1, "sends 3 elements to ");
}

void check_abort(const Comm& comm, int culprit) {
  if (comm->rank() == culprit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    comm->abort("the disk caught fire");
  }
  require_failure(comm, culprit, "the disk caught fire");  // a timeout has another text
}

void check_timeout(const Comm& comm, int absent, std::chrono::milliseconds timeout) {
  comm->set_timeout(timeout);
  if (comm->rank() == absent) {
    std::this_thread::sleep_for(3 * timeout);
    return;
  }
  require_failure(comm, absent, "rank " + std::to_string(absent));
}

}  // namespace zero::test
