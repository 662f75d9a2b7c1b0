// `zero run`: options and hosts become LaunchSettings; lines, notices and reports of the launcher
// become stdout and stderr. How ranks are started and ended is src/launch.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/config_check.h"
#include "cli/options.h"
#include "launch/host.h"
#include "launch/hostfile.h"
#include "launch/launcher.h"
#include "report/text.h"

namespace {

using namespace zero;
using launch::Host;

struct RunOptions {
  std::string ranks, hostfile, include, exclude, master_address, launcher, launcher_args, log_dir, output = "all", core_list, save_pid, env_file;
  std::int64_t nodes = 1, master_port = 0, node_rank = 0, ssh_port = 22, restarts = 0;
  double grace = 3, stop_timeout = 600, hang_timeout = 600;
  bool no_ssh = false, no_prefix = false, bind = false, pass_local_rank = false, strict = false;
  std::string config;
  std::vector<std::pair<std::string, std::string>> set;
  std::vector<std::string> exported, program;
};

// Bytes waiting for a stream that may be slow. Writes of at most PIPE_BUF after poll() said "room"
// do not block, so a stopped reader cannot keep the launcher from its signals.
class Waiting {
 public:
  explicit Waiting(int fd) : fd_(fd) {}
  void add(std::string_view text) {
    if (error_ == 0) bytes_ += text;
  }
  std::size_t size() const { return bytes_.size() - at_; }
  int error() const { return error_; }
  bool pump() {
    while (at_ < bytes_.size()) {
      pollfd ready{fd_, POLLOUT, 0};
      if (poll(&ready, 1, 0) <= 0) return false;
      const ssize_t n = ::write(fd_, bytes_.data() + at_, std::min<std::size_t>(bytes_.size() - at_, 4096));
      if (n < 0 && (errno == EINTR || errno == EAGAIN)) return false;
      if (n < 0) {
        error_ = errno;
        break;
      }
      at_ += static_cast<std::size_t>(n);
    }
    bytes_.clear();
    at_ = 0;
    return true;
  }

 private:
  int fd_;
  std::string bytes_;
  std::size_t at_ = 0;
  int error_ = 0;
};

class Terminal final : public launch::LaunchSink {
 public:
  Terminal(const RunOptions& options, const cli::Global& global)
      : json_(global.json), prefix_(!options.no_prefix), output_(options.output), least_(cli::log_threshold(global)) {}

  void line(int rank, launch::Stream stream, std::string_view text) override {
    if (output_ == "none" || (output_ == "rank0" && rank != 0)) return;
    std::string whole = prefix_ ? "[" + std::to_string(rank) + "] " : "";
    whole.append(text) += '\n';
    // With --json stdout is the document's alone.
    (stream == launch::Stream::Out && !json_ ? out_ : err_).add(whole);
  }
  void notice(LogLevel level, std::string_view text) override {
    if (level < least_) return;
    std::string line = "zero run: ";
    if (level == LogLevel::Warning) line += "warning: ";
    if (level == LogLevel::Error) line += "error: ";
    err_.add(line.append(text) += '\n');
  }
  void failed(const launch::FailureReport& report) override {
    std::string text;
    if (!report.last_lines.empty()) {
      text += "--- last lines of rank " + std::to_string(report.rank) + " ---\n";
      for (const std::string& line : report.last_lines) text += line + "\n";
      text += "---\n";
    }
    err_.add(text + launch::failure_text(report));
    reports_.push_back(launch::failure_json(report));
  }
  bool pump() override {
    const bool out = out_.pump();
    return err_.pump() && out;
  }
  bool full() const override { return out_.size() + err_.size() > kMostBytes; }
  int out_error() const override { return out_.error(); }
  const std::vector<std::string>& reports() const { return reports_; }

 private:
  static constexpr std::size_t kMostBytes = 4 << 20;
  Waiting out_{1}, err_{2};
  bool json_, prefix_;
  std::string output_;
  LogLevel least_;
  std::vector<std::string> reports_;  // JSON, one an attempt
};

// The launcher's process id in a file for as long as it runs.
class PidFile {
 public:
  explicit PidFile(const std::string& path) : path_(path) {
    if (path_.empty()) return;
    std::ofstream out(path_);
    out << getpid() << "\n";
    if (!out.flush()) throw IoError("[--save-pid] got " + std::string(std::strerror(errno)) + " for " + path_ + ", expected a file to write");
  }
  ~PidFile() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  PidFile(const PidFile&) = delete;
  PidFile& operator=(const PidFile&) = delete;

 private:
  std::string path_;
};

void declare(cli::Command& c, RunOptions& o) {
  c.section("Ranks and hosts");
  c.option("-n,--num-gpus,--nproc-per-node", o.ranks, "N", "ranks on this host: a number, gpu, cpu or auto (GPUs if any, else cores)");
  c.option("--num-nodes,--nnodes", o.nodes, "N", "use the first N hosts of the hostfile", 1, 65536);
  c.option("-H,--hostfile", o.hostfile, "FILE", "lines of \"HOST slots=N\"");
  c.option("-i,--include", o.include, "FILTER", "only HOST[:SLOT,...][@HOST...]; localhost needs no hostfile");
  c.option("-e,--exclude", o.exclude, "FILTER", "all but these, same form");
  c.option("--master-addr", o.master_address, "ADDRESS", "MASTER_ADDR of the ranks (127.0.0.1)");
  c.option("--master-port", o.master_port, "PORT", "MASTER_PORT of the ranks (a free one)", 1, 65535);
  c.option("--node-rank", o.node_rank, "N", "this host's number when started by hand", 0, 65535);
  c.flag("--no-ssh", o.no_ssh, "the same command is started on every host by hand");
  c.choice("--launcher", o.launcher, {"ssh", "srun", "mpirun"}, "how other hosts are reached");
  c.option("--ssh-port", o.ssh_port, "PORT", "port of ssh", 1, 65535);
  c.option("--launcher-args", o.launcher_args, "ARGS", "further arguments of that program");
  c.section("Environment");
  c.repeated("--export", o.exported, "NAME", "a variable that other hosts get, too");
  c.option("--env-file", o.env_file, "FILE", "lines of NAME=VALUE for every rank");
  c.flag("--bind-cores-to-rank", o.bind, "pin ranks to cores, NUMA node by node");
  c.option("--bind-core-list", o.core_list, "LIST", "the cores to use, such as 0,2-5 (implies the above)");
  c.flag("--pass-local-rank", o.pass_local_rank, "append --local_rank=N to the program's arguments");
  c.config(o.config, o.set, o.strict);
  c.section("Output");
  c.option("--log-dir,--enable-each-rank-log", o.log_dir, "DIR", "also write DIR/<run-id>/rank-<N>.out and .err");
  c.choice("--output", o.output, {"all", "rank0", "none"}, "ranks whose lines are shown");
  c.flag("--no-prefix", o.no_prefix, "lines without \"[rank] \"");
  c.section("Failure");
  c.option("--grace", o.grace, "S", "seconds from SIGTERM to SIGKILL after a failure (3)", 0, 86400);
  c.option("--stop-timeout", o.stop_timeout, "S", "seconds to save after SIGTERM or SIGUSR1 (600)", 0, 864000);
  c.option("--hang-timeout", o.hang_timeout, "S", "seconds without progress that are a failure (600)", 0.1, 864000);
  c.option("--max-restarts", o.restarts, "N", "start all ranks again after a failure (0)", 0, 1000000);
  c.option("--save-pid", o.save_pid, "FILE", "write the launcher's process id");
  const std::string direct = "programs are always started directly";
  c.no_effect("--no-python", false, direct);
  c.no_effect("--no-ssh-check", false, "hosts are not probed");
  c.no_effect("--force-multi", false, "one host is started without ssh");
  c.no_effect("--no-local-rank", false, "--local_rank is only appended with --pass-local-rank");
  c.refused("--module", false, "it starts Python modules; name the program: zero run python -m MODULE");
  c.refused("--venv-script", true, "activate the environment before zero run");
  c.refused("--elastic-training", false, "a changing number of ranks is not built");
  c.refused("--autotuning", true, "not built; see `zero bench stages`");
  c.trailing(o.program, "PROGRAM [ARGS...]", "what each rank runs; options end here");
}

// This host with its slots; on a host without GPUs a slot is a core.
Host own_host(const std::vector<std::string>& gpus) {
  Host host{"localhost", {}};
  const int slots = gpus.empty() ? launch::usable_cores() : static_cast<int>(gpus.size());
  for (int i = 0; i < slots; ++i) host.slots.push_back(i);
  return host;
}

int rank_count(const std::string& text, std::size_t gpus) {
  const int cores = launch::usable_cores();
  if (text == "gpu") {
    if (gpus == 0) throw ConfigError("[--num-gpus] got gpu, expected a host with GPUs. Hint: use -n cpu or a number.");
    return static_cast<int>(gpus);
  }
  if (text == "cpu") return cores;
  if (text == "auto") return gpus > 0 ? static_cast<int>(gpus) : cores;
  char* end = nullptr;
  const long n = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || text[0] < '0' || text[0] > '9' || *end || n < 1 || n > 1024)
    throw ConfigError("[--num-gpus] got \"" + text.substr(0, 80) + "\", expected a number from 1 to 1024, gpu, cpu or auto");
  if (gpus > 0 && n > static_cast<long>(gpus))
    throw ConfigError("[--num-gpus] got " + text + " ranks, expected at most the " + std::to_string(gpus) +
                      " GPUs of this host. Hint: CUDA_VISIBLE_DEVICES= zero run ... starts CPU ranks.");
  return static_cast<int>(n);
}

// The chosen slots of this host, and in `source` where that came from.
Host choose_host(const cli::Command& c, const RunOptions& o, const std::vector<std::string>& gpus, std::string& source) {
  const bool filtered = c.given("--include") || c.given("--exclude");
  if (c.given("--include") && c.given("--exclude"))
    throw ConfigError("[--exclude] got --include as well, expected one of the two");
  if (filtered && (c.given("--num-nodes") || c.given("--num-gpus")))
    throw ConfigError("[--include, --exclude] got --num-nodes or --num-gpus as well, expected either a filter or numbers");
  std::vector<Host> hosts;
  if (!o.hostfile.empty()) {
    hosts = launch::read_hostfile(o.hostfile);
    source = o.hostfile;
  } else {
    hosts.push_back(own_host(gpus));
    source = gpus.empty() ? "one host without GPUs" : "the GPUs of this host";
  }
  if (c.given("--include")) hosts = launch::include_hosts(hosts, o.include), source = "--include";
  if (c.given("--exclude")) hosts = launch::exclude_hosts(hosts, o.exclude), source = "--exclude";
  if (c.given("--num-nodes")) {
    if (o.nodes > static_cast<std::int64_t>(hosts.size()))
      throw ConfigError("[--num-nodes] got " + std::to_string(o.nodes) + " hosts, expected at most " + std::to_string(hosts.size()) +
                        (o.hostfile.empty() ? ". Hint: name the hosts in a --hostfile." : " (" + o.hostfile + ")"));
    hosts.resize(static_cast<std::size_t>(o.nodes));
  }
  for (const Host& host : hosts)
    if (!launch::is_this_host(host.name))
      throw ConfigError("[zero run] got host " + host.name + ", expected this host only: starting ranks on other hosts is not available in this version");
  if (hosts.size() > 1) throw ConfigError("[zero run] got this host under " + std::to_string(hosts.size()) + " names, expected one");
  Host host = hosts[0];
  if (c.given("--num-gpus")) {
    const int n = rank_count(o.ranks, o.hostfile.empty() ? gpus.size() : host.slots.size());
    host.slots.resize(static_cast<std::size_t>(n));
    for (int i = 0; i < n; ++i) host.slots[static_cast<std::size_t>(i)] = i;
    source = "--num-gpus";
  } else if (o.hostfile.empty() && !filtered && gpus.empty()) {
    host.slots = {0};
  }
  for (const int slot : host.slots)
    if (!gpus.empty() && slot >= static_cast<int>(gpus.size()))
      throw ConfigError("[" + source + "] got slot " + std::to_string(slot) + " of " + host.name + ", expected one of its " +
                        std::to_string(gpus.size()) + " GPUs");
  return host;
}

void refuse_other_hosts(const cli::Command& c, const RunOptions& o) {
  const std::string rest = ", expected this host only: starting ranks on other hosts is not available in this version";
  if (c.given("--launcher") && o.launcher != "ssh") throw ConfigError("[--launcher] got " + o.launcher + rest);
  if (c.given("--node-rank") && o.node_rank != 0) throw ConfigError("[--node-rank] got " + std::to_string(o.node_rank) + rest);
  if (o.no_ssh && o.nodes > 1) throw ConfigError("[--no-ssh] got --num-nodes " + std::to_string(o.nodes) + rest);
}

std::map<std::string, std::string> read_env_file(const std::string& path) {
  std::map<std::string, std::string> values;
  if (path.empty()) return values;
  std::ifstream in(path);
  if (!in) throw IoError("[--env-file] got " + std::string(std::strerror(errno)) + " for " + path + ", expected a readable file", ExitCode::kConfig);
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    if (line.empty() || line[0] == '#') continue;
    const std::size_t equals = line.find('=');
    const std::string name = line.substr(0, equals);
    const bool ok = equals != std::string::npos && !name.empty() &&
                    name.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_") == std::string::npos;
    if (!ok) throw ConfigError(path + ":" + std::to_string(number) + ":1: error: got \"" + line.substr(0, 80) + "\", expected NAME=VALUE");
    values[name] = line.substr(equals + 1);
  }
  return values;
}

}  // namespace

int zero_run(int argc, char** argv) {
  RunOptions o;
  cli::Command c("run", "start ranks of any program on this host and look after them", "[options] [--] PROGRAM [ARGS...]",
                 "  zero run -n 4 --log-dir logs ./my_program --epochs 3\n");
  declare(c, o);
  if (!c.parse(argc, argv)) return 0;
  refuse_other_hosts(c, o);
  if (!o.config.empty()) cli::check_config(o.config, o.set, o.strict);

  const std::vector<std::string> gpus = launch::gpu_slots();
  std::string source;
  const Host host = choose_host(c, o, gpus, source);
  launch::LaunchSettings s;
  s.program = o.program;
  s.ranks = static_cast<int>(host.slots.size());
  if (!gpus.empty())
    for (const int slot : host.slots) s.visible_devices.push_back(gpus[static_cast<std::size_t>(slot)]);
  if (!o.master_address.empty()) s.master_address = o.master_address;
  s.master_port = static_cast<int>(o.master_port);
  s.log_folder = o.log_dir.empty() ? c.global().log_dir : o.log_dir;
  s.environment = read_env_file(o.env_file);
  if (!o.config.empty()) s.environment["ZERO_CONFIG"] = std::filesystem::absolute(o.config);
  s.pass_local_rank = o.pass_local_rank;
  s.grace_s = o.grace;
  s.stop_timeout_s = o.stop_timeout;
  s.hang_timeout_s = o.hang_timeout;
  s.max_restarts = static_cast<int>(o.restarts);
  if (o.bind || !o.core_list.empty()) {
    const std::vector<int> allowed = launch::allowed_cores();
    std::vector<int> cores = allowed;
    if (!o.core_list.empty()) cores = launch::parse_core_list(o.core_list, "--bind-core-list");
    for (const int core : cores)
      if (std::find(allowed.begin(), allowed.end(), core) == allowed.end())
        throw ConfigError("[--bind-core-list] got core " + std::to_string(core) + ", expected one of the " + std::to_string(allowed.size()) +
                          " that this process may use (" + std::to_string(allowed.front()) + " to " + std::to_string(allowed.back()) + ")");
    s.cores = launch::deal_cores(cores, s.ranks);
  }

  Terminal terminal(o, c.global());
  if (!o.set.empty()) terminal.notice(LogLevel::Warning, "--set is only checked here: give it to the program, too");
  for (const std::string& notice : c.notices()) terminal.notice(LogLevel::Warning, notice);
  for (const char* folder : {static_cast<const char*>(std::getenv("HOME")), "."})
    if (folder && access((std::string(folder) + "/.deepspeed_env").c_str(), F_OK) == 0)
      terminal.notice(LogLevel::Warning, std::string(folder) + "/.deepspeed_env is not read: use --env-file");
  launch::Launcher launcher(s, terminal);
  const PidFile pid_file(o.save_pid);
  std::string first = "ranks: " + std::to_string(s.ranks) + " on localhost from " + source + ", run " + launcher.run_id();
  if (launcher.omp_threads() > 0) first += ", OMP_NUM_THREADS=" + std::to_string(launcher.omp_threads());
  terminal.notice(LogLevel::Info, first);

  const launch::LaunchResult result = launcher.run();
  int code = result.exit_code;
  if (code == 0 && terminal.out_error() != 0 && terminal.out_error() != EPIPE) {
    cli::print_error("run", std::string("[stdout] got ") + std::strerror(terminal.out_error()) + ", expected to write the ranks' lines");
    code = static_cast<int>(ExitCode::kIo);
  }
  if (c.global().json) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.3f", result.seconds);
    const auto& reports = terminal.reports();
    std::string document = "{\"schema\": \"zero.run/1\", ";
    if (code != 0 && !reports.empty()) {  // the last failure's fields are the document's own
      document += reports.back().substr(1, reports.back().size() - 2);
    } else {
      document += "\"exit_code\": " + std::to_string(code) + ", \"run_id\": " + report::json_quote(result.run_id);
    }
    document += ", \"ranks\": " + std::to_string(s.ranks) + ", \"attempts\": " + std::to_string(result.attempts) +
                ", \"seconds\": " + seconds + ", \"failures\": [";
    for (std::size_t i = 0; i < reports.size(); ++i) document += (i ? ", " : "") + reports[i];
    cli::print_result(document + "]}\n");
  }
  return code;
}
