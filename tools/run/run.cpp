// `zero run`: converts options and hosts to LaunchSettings, and prints the launcher's lines, notices and reports.
// Starting and ending ranks is in tools/launch.
#include <fcntl.h>
#include <poll.h>
#include <pwd.h>
#include <spawn.h>
#include <sys/wait.h>
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

#include "base/fd.h"
#include "base/json_write.h"
#include "base/printable.h"
#include "base/system.h"
#include "tools/commands.h"
#include "tools/launch/local/rank_process.h"
#include "tools/launch/machine/host.h"
#include "tools/launch/remote/agent.h"
#include "tools/launch/remote/hostfile.h"
#include "tools/launch/supervise/launcher.h"
#include "tools/support/config_check.h"
#include "tools/support/options.h"

namespace {

using namespace zero;
using launch::Host;
using launch::LaunchHost;

constexpr int kPortOfSeveralHosts = 29500;

struct RunOptions {
  std::string ranks, hostfile, include, exclude, master_address, launcher = "ssh", launcher_args, log_dir,
                                                                 output = "all", core_list, save_pid, env_file;
  std::int64_t nodes = 1, master_port = 0, node_rank = 0, ssh_port = 0, restarts = 0, min_ranks = 0, min_hosts = 1;
  double grace = 3, stop_timeout = 600, hang_timeout = 600, host_timeout = 30;
  bool no_ssh = false, no_prefix = false, bind = false, pass_local_rank = false, strict = false;
  bool deepspeed = false, module = false, no_local_rank = false;
  std::string config;
  std::vector<std::pair<std::string, std::string>> set;
  std::vector<std::string> exported, program;
};

// Buffered output for a stream that may be slow. Writes of at most PIPE_BUF after poll() reports space do not block, so
// a stopped reader cannot keep the launcher from handling signals.
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
  // several_hosts: the host is shown in the prefix.
  Terminal(const RunOptions& options, const cli::Global& global, bool several_hosts)
      : several_hosts_(several_hosts),
        json_(global.json),
        prefix_(!options.no_prefix),
        output_(options.output),
        least_(cli::log_threshold(global)) {}
  void placed(const std::vector<LaunchHost>& hosts) override {
    hosts_.clear();
    for (const LaunchHost& host : hosts)
      hosts_.insert(hosts_.end(), host.slots.size(), several_hosts_ ? host.name + ":" : "");
  }

  void line(int rank, launch::Stream stream, std::string_view text) override {
    if (output_ == "none" || (output_ == "rank0" && rank != 0)) return;
    std::string whole = prefix_ ? "[" + hosts_[static_cast<std::size_t>(rank)] + std::to_string(rank) + "] " : "";
    whole.append(text) += '\n';
    // With --json, stdout contains only the document.
    (stream == launch::Stream::Out && !json_ ? out_ : err_).add(whole);
  }
  void notice(LogLevel level, std::string_view text) override {
    if (level < least_) return;
    std::string line = "zero run: ";
    if (level == LogLevel::Warning) line += "warning: ";
    if (level == LogLevel::Error) line += "error: ";
    err_.add(line.append(base::printable(text)) += '\n');  // ssh and other hosts write some of them
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
  bool several_hosts_, json_, prefix_;
  std::string output_;
  LogLevel least_;
  std::vector<std::string> hosts_;    // of each rank, with a colon; empty on one host
  std::vector<std::string> reports_;  // JSON, one per attempt
};

// A file with the launcher's process id while it runs.
class PidFile {
 public:
  explicit PidFile(const std::string& path) : path_(path) {
    if (path_.empty()) return;
    const base::Descriptor file(
        ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666));  // /tmp is everybody's
    const std::string text = std::to_string(getpid()) + "\n";
    if (!file || ::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
      throw IoError("[--save-pid] got " + std::string(std::strerror(errno)) + " for " + path_ +
                    ", expected a file to write");
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
  c.option("-n,--num-gpus,--nproc-per-node,--num-accelerators", o.ranks, "N",
           "ranks on each host: a number, gpu, cpu or auto (GPUs if any, else cores)");
  c.option("--num-nodes,--nnodes", o.nodes, "N", "use the first N hosts of the hostfile", 1, 65536);
  c.option("-H,--hostfile", o.hostfile, "FILE", "lines of \"[USER@]HOST slots=N\"");
  c.option("-i,--include", o.include, "FILTER", "only HOST[:SLOT,...][@HOST...]; localhost needs no hostfile");
  c.option("-e,--exclude", o.exclude, "FILTER", "all except these, in the same form");
  c.option("--master-addr", o.master_address, "ADDRESS", "MASTER_ADDR of the ranks (the first host)");
  c.option("--master-port", o.master_port, "PORT", "MASTER_PORT of the ranks (a free one; on several hosts 29500)", 1,
           65535);
  c.option("--node-rank", o.node_rank, "N", "this is host N; the same command is started on every host by hand", 0,
           65535);
  c.flag("--no-ssh", o.no_ssh, "do not use ssh; requires --node-rank");
  c.choice("--launcher", o.launcher, {"ssh", "srun", "mpirun"}, "how other hosts are reached (ssh)");
  c.option("--ssh-port", o.ssh_port, "PORT", "port of ssh", 1, 65535);
  c.option("--launcher-args", o.launcher_args, "ARGS", "additional arguments of that program");
  c.section("Programs written for DeepSpeed (Python, with the package libzero)");
  c.flag("--deepspeed", o.deepspeed,
         "PROGRAM is a script for DeepSpeed: each rank runs python -m libzero.deepspeed.run PROGRAM [ARGS...]");
  c.flag("--module", o.module, "with --deepspeed: PROGRAM is the name of a module");
  c.flag("--no-local-rank", o.no_local_rank, "with --deepspeed: do not pass --local_rank=N to the script");
  c.section("Environment");
  c.repeated("--export", o.exported, "NAME", "also pass this variable to other hosts");
  c.option("--env-file", o.env_file, "FILE", "lines of NAME=VALUE for every rank");
  c.flag("--bind-cores-to-rank", o.bind, "pin ranks to cores, by NUMA node");
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
  c.option("--hang-timeout", o.hang_timeout, "S", "seconds without progress that count as a failure (600)", 0.1,
           864000);
  c.option("--host-timeout", o.host_timeout, "S", "seconds of silence after which another host is lost (30)", 0.5,
           86400);
  c.option("--restarts,--max-restarts", o.restarts, "N", "restart all ranks after a failure, up to N times (0)", 0,
           1000000);
  c.option("--min-ranks", o.min_ranks, "M",
           "restart without a lost host, or a slot that failed twice in a row, while M ranks are left", 1, 1 << 20);
  c.option("--min-hosts", o.min_hosts, "N", "the same, while N hosts are left", 1, 65536);
  c.option("--save-pid", o.save_pid, "FILE", "write the launcher's process id");
  const std::string direct = "programs are always started directly";
  c.no_effect("--no-python", false, direct);
  c.no_effect("--no-ssh-check", false, "hosts are not probed");
  c.no_effect("--force-multi", false, "one host is started without ssh");
  c.refused("--venv-script", true, "activate the environment before zero run");
  c.refused("--elastic-training", false, "use --restarts N with --min-ranks M");
  c.refused("--autotuning", true, "not built; see `zero bench stages`");
  c.trailing(o.program, "PROGRAM [ARGS...]", "what each rank runs; options end here");
}

// This host with its slots. Without GPUs a slot is a core.
Host own_host(const std::vector<std::string>& gpus) {
  Host host{"localhost", {}};
  const int slots = gpus.empty() ? launch::usable_cores() : static_cast<int>(gpus.size());
  for (int i = 0; i < slots; ++i) host.slots.push_back(i);
  return host;
}

// slots: GPUs of this host, or the hostfile's slots of `host`.
int rank_count(const std::string& text, std::size_t slots, const std::string& host = "") {
  const int cores = launch::usable_cores();
  if (text == "gpu") {
    if (slots == 0) throw ConfigError("[--num-gpus] got gpu, expected a host with GPUs. Hint: use -n cpu or a number.");
    return static_cast<int>(slots);
  }
  if (text == "cpu") return cores;
  if (text == "auto") return slots > 0 ? static_cast<int>(slots) : cores;
  char* end = nullptr;
  const long n = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || text[0] < '0' || text[0] > '9' || *end || n < 1 || n > 1024)
    throw ConfigError("[--num-gpus] got \"" + text.substr(0, 80) +
                      "\", expected a number from 1 to 1024, gpu, cpu or auto");
  if (slots > 0 && n > static_cast<long>(slots))
    throw ConfigError("[--num-gpus] got " + text + " ranks, expected at most the " + std::to_string(slots) +
                      (host.empty() ? " GPUs of this host. Hint: CUDA_VISIBLE_DEVICES= zero run ... starts CPU ranks."
                                    : " slots of " + host));
  return static_cast<int>(n);
}

struct Chosen {
  std::vector<LaunchHost> hosts;
  int by_hand = -1;
  std::string source;  // the source of the hosts
  std::string master_address;
  bool others = false;  // some are remote and started by this launcher
};

// The hosts that remain after hostfile, filters and --num-nodes.
std::vector<Host> list_hosts(const cli::Command& c, const RunOptions& o, const std::vector<std::string>& gpus,
                             Chosen& chosen) {
  const bool filtered = c.given("--include") || c.given("--exclude");
  if (c.given("--include") && c.given("--exclude"))
    throw ConfigError("[--exclude] got --include as well, expected one of the two");
  if (filtered && (c.given("--num-nodes") || c.given("--num-gpus")))
    throw ConfigError(
        "[--include, --exclude] got --num-nodes or --num-gpus as well, expected either a filter or numbers");
  std::vector<Host> hosts;
  if (!o.hostfile.empty()) {
    hosts = launch::read_hostfile(o.hostfile);
    chosen.source = o.hostfile;
  } else {
    hosts.push_back(own_host(gpus));
    chosen.source = gpus.empty() ? "one host without GPUs" : "the GPUs of this host";
  }
  if (c.given("--include")) hosts = launch::include_hosts(hosts, o.include), chosen.source = "--include";
  if (c.given("--exclude")) hosts = launch::exclude_hosts(hosts, o.exclude), chosen.source = "--exclude";
  const bool by_hand = c.given("--node-rank") || o.no_ssh;
  if (o.hostfile.empty() && by_hand && o.nodes > 1) {  // every host is assumed to be like this one
    hosts[0].name = base::host_name("localhost");
    hosts.resize(static_cast<std::size_t>(o.nodes), hosts[0]);
  }
  if (c.given("--num-nodes")) {
    if (o.nodes > static_cast<std::int64_t>(hosts.size()))
      throw ConfigError(
          "[--num-nodes] got " + std::to_string(o.nodes) + " hosts, expected at most " + std::to_string(hosts.size()) +
          (o.hostfile.empty() ? ". Hint: name the hosts in a --hostfile, or give --node-rank on each of them."
                              : " (" + o.hostfile + ")"));
    hosts.resize(static_cast<std::size_t>(o.nodes));
  }
  if (c.given("--num-gpus")) {
    for (Host& host : hosts) {
      if (hosts.size() > 1 && o.ranks == "cpu")
        throw ConfigError("[--num-gpus] got cpu for " + std::to_string(hosts.size()) + " hosts, expected a number");
      const int n =
          o.hostfile.empty() ? rank_count(o.ranks, gpus.size()) : rank_count(o.ranks, host.slots.size(), host.name);
      host.slots.resize(static_cast<std::size_t>(n));
      for (int i = 0; i < n; ++i) host.slots[static_cast<std::size_t>(i)] = i;
    }
    chosen.source = "--num-gpus";
  } else if (o.hostfile.empty() && !filtered && gpus.empty()) {
    for (Host& host : hosts) host.slots = {0};
  }
  return hosts;
}

std::string own_user() {
  const passwd* entry = getpwuid(geteuid());
  return entry ? entry->pw_name : std::to_string(geteuid());
}

// The number of this host, if each host is started by hand.
int own_number(const cli::Command& c, const RunOptions& o, const std::vector<Host>& hosts) {
  if (!c.given("--node-rank"))
    throw ConfigError("[--no-ssh] got " + std::to_string(hosts.size()) +
                      " hosts without --node-rank, expected the number of this one");
  if (o.node_rank >= static_cast<std::int64_t>(hosts.size()))
    throw ConfigError("[--node-rank] got " + std::to_string(o.node_rank) + " of " + std::to_string(hosts.size()) +
                      " hosts, expected at most " + std::to_string(hosts.size() - 1) +
                      (hosts.size() == 1 ? ". Hint: --nnodes N tells how many there are." : ""));
  if (o.hostfile.empty()) return static_cast<int>(o.node_rank);
  const Host& own = hosts[static_cast<std::size_t>(o.node_rank)];
  for (const Host& host : hosts)
    if (host.name != own.name && !launch::is_this_host(own.name) && launch::is_this_host(host.name))
      throw ConfigError("[--node-rank] got " + std::to_string(o.node_rank) + ", which is " + own.name + " in " +
                        o.hostfile + ", but this host is " + host.name + ", expected one story");
  return static_cast<int>(o.node_rank);
}

Chosen choose_hosts(const cli::Command& c, const RunOptions& o, const std::vector<std::string>& gpus) {
  Chosen chosen;
  const std::vector<Host> hosts = list_hosts(c, o, gpus, chosen);
  const bool by_hand = c.given("--node-rank") || (o.no_ssh && hosts.size() > 1);
  if (by_hand) chosen.by_hand = own_number(c, o, hosts);
  if (by_hand && c.given("--launcher"))
    throw ConfigError(
        "[--launcher] got --node-rank or --no-ssh as well, expected one of the two ways to start other hosts");
  const Host* here = nullptr;
  for (std::size_t h = 0; h < hosts.size(); ++h) {
    const Host& host = hosts[h];
    const bool own = by_hand ? static_cast<int>(h) == chosen.by_hand : launch::is_this_host(host.name);
    if (own && here)
      throw ConfigError("[zero run] got this host as " + here->name + " and as " + host.name + ", expected one name");
    if (own) here = &host;
    if (own && !by_hand && !host.user.empty() && host.user != own_user())
      throw ConfigError("[--hostfile] got user " + host.user + " of " + host.name + ", which is this host, expected " +
                        own_user() + " or no user");
    if (!own && !by_hand && !host.user.empty() && o.launcher != "ssh")
      throw ConfigError("[--hostfile] got user " + host.user + " of " + host.name + " with --launcher " + o.launcher +
                        ", expected ssh or no user");
    if (own && !gpus.empty())
      for (const int slot : host.slots)
        if (slot >= static_cast<int>(gpus.size()))
          throw ConfigError("[" + chosen.source + "] got slot " + std::to_string(slot) + " of " + host.name +
                            ", expected one of its " + std::to_string(gpus.size()) + " GPUs");
    chosen.hosts.push_back({host.name, host.slots, own, host.user});
    chosen.others |= !own && !by_hand;
  }
  if (c.given("--launcher") && o.launcher != "ssh" && !chosen.others)
    throw ConfigError("[--launcher] got " + o.launcher + " and no other host, expected a --hostfile that names some");
  chosen.master_address = o.master_address;
  if (o.master_address.empty()) {
    chosen.master_address = hosts.size() > 1 ? hosts[0].name : "127.0.0.1";
    const bool nowhere = hosts.size() > 1 && (o.hostfile.empty() || launch::is_loopback(hosts[0].name));
    if (nowhere)
      throw ConfigError("[--master-addr] got none and " +
                        (o.hostfile.empty() ? std::string("no hostfile") : hosts[0].name + " as the first host") +
                        ", expected an address of the first host that the others can reach");
  }
  return chosen;
}

std::map<std::string, std::string> read_env_file(const std::string& path) {
  std::map<std::string, std::string> values;
  if (path.empty()) return values;
  std::ifstream in(path);
  if (!in)
    throw IoError(
        "[--env-file] got " + std::string(std::strerror(errno)) + " for " + path + ", expected a readable file",
        ExitCode::kConfig);
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    if (line.empty() || line[0] == '#') continue;
    const std::size_t equals = line.find('=');
    const std::string name = line.substr(0, equals);
    const bool ok =
        equals != std::string::npos && !name.empty() &&
        name.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_") == std::string::npos;
    if (!ok)
      throw ConfigError(path + ":" + std::to_string(number) + ":1: error: got \"" + line.substr(0, 80) +
                        "\", expected NAME=VALUE");
    values[name] = line.substr(equals + 1);
  }
  return values;
}

// Whether the interpreter finds the package. It is not imported: that loads torch.
bool has_libzero(const std::string& python) {
  std::string path = python, option = "-c",
              text = "import importlib.util as u; raise SystemExit(not getattr(u.find_spec('libzero'), 'origin', 0))";
  char* words[] = {path.data(), option.data(), text.data(), nullptr};
  pid_t child = 0;
  if (posix_spawn(&child, words[0], nullptr, nullptr, words, environ) != 0) return false;
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// --deepspeed: the program becomes the package's runner of such programs (python/libzero/deepspeed/run.py).
// here: this host has ranks, so its interpreter and script are checked.
void run_by_python(const cli::Command& c, RunOptions& o, bool here) {
  if (c.given("--save-pid"))
    throw ConfigError(
        "[--save-pid] got the option with --deepspeed, expected it without: DeepSpeed's has no FILE, and the script "
        "would be taken for it. Hint: the process id of `zero run` is the launcher's.");
  if (o.pass_local_rank)
    throw ConfigError(
        "[--pass-local-rank] got the option with --deepspeed, expected it without: the script gets --local_rank=N "
        "anyway. Hint: --no-local-rank leaves it out.");
  const char* chosen = std::getenv("ZERO_PYTHON");
  std::string python = chosen != nullptr && *chosen != '\0' ? chosen : "python3";
  if (here) {
    const std::string hint =
        " Hint: activate its environment (pip install . in a clone installs it), or set ZERO_PYTHON to the "
        "interpreter.";
    try {
      python = std::filesystem::absolute(launch::find_program(python));  // other hosts may have another PATH
    } catch (const ConfigError& error) {
      throw ConfigError("[--deepspeed] got no interpreter: " + std::string(error.what()) + hint);
    }
    if (!has_libzero(python))
      throw ConfigError("[--deepspeed] got " + python +
                        ", which does not find the module libzero, expected a Python with the package libzero." + hint);
    if (!o.module && access(o.program[0].c_str(), R_OK) != 0)
      throw ConfigError("[--deepspeed] got " + std::string(std::strerror(errno)) + " for " + o.program[0] +
                        ", expected a Python script. Hint: --module if it is the name of a module.");
  }
  std::vector<std::string> words{python, "-u", "-m", "libzero.deepspeed.run"};  // unbuffered, as DeepSpeed starts it
  if (o.no_local_rank) words.push_back("--no_local_rank");
  if (o.module) words.push_back("--module");
  o.program.insert(o.program.begin(), words.begin(), words.end());
  if (std::getenv("PYTHONPATH") != nullptr) o.exported.push_back("PYTHONPATH");  // libzero may be found by it
}

// --min-ranks and --min-hosts; either makes restarts elastic.
void take_least(const cli::Command& c, const RunOptions& o, launch::LaunchSettings& s) {
  const bool ranks = c.given("--min-ranks");
  if (!ranks && !c.given("--min-hosts")) return;
  const std::string option = ranks ? "[--min-ranks] got " : "[--min-hosts] got ";
  if (o.restarts == 0) throw ConfigError(option + "no --restarts, expected how often to restart");
  if (s.by_hand >= 0)
    throw ConfigError(option + "--node-rank or --no-ssh as well, expected one launcher for all hosts");
  std::size_t all = 0;
  for (const LaunchHost& host : s.hosts) all += host.slots.size();
  if (o.min_ranks > static_cast<std::int64_t>(all))
    throw ConfigError("[--min-ranks] got " + std::to_string(o.min_ranks) + ", expected at most the " +
                      std::to_string(all) + " of the start");
  if (o.min_hosts > static_cast<std::int64_t>(s.hosts.size()))
    throw ConfigError("[--min-hosts] got " + std::to_string(o.min_hosts) + ", expected at most the " +
                      std::to_string(s.hosts.size()) + " of the start");
  s.min_ranks = static_cast<int>(std::max<std::int64_t>(1, o.min_ranks));
  s.min_hosts = static_cast<int>(o.min_hosts);
}

// "localhost", "host w1", "2 hosts (w0, w1)", "host w1 (number 1 of 2)".
std::string place_of(const Chosen& chosen) {
  if (chosen.by_hand >= 0)
    return "host " + chosen.hosts[static_cast<std::size_t>(chosen.by_hand)].name + " (number " +
           std::to_string(chosen.by_hand) + " of " + std::to_string(chosen.hosts.size()) + ")";
  if (chosen.hosts.size() == 1) return chosen.others ? "host " + chosen.hosts[0].name : "localhost";
  std::string names;
  for (std::size_t h = 0; h < chosen.hosts.size() && h < 8; ++h) names += (h ? ", " : "") + chosen.hosts[h].name;
  return std::to_string(chosen.hosts.size()) + " hosts (" + names + (chosen.hosts.size() > 8 ? ", ...)" : ")");
}

}  // namespace

int zero_run(int argc, char** argv) {
  // Started by a launcher on another host: stdin and stdout are its connection.
  if (argc == 2 && std::strcmp(argv[1], "--agent") == 0) return launch::run_agent(0, 1);
  RunOptions o;
  cli::Command c("run", "start and supervise the ranks of any program, on one or several hosts",
                 "[options] [--] PROGRAM [ARGS...]", "  zero run -n 4 --log-dir logs ./my_program --epochs 3\n");
  declare(c, o);
  if (!c.parse(argc, argv)) return 0;
  if (!o.config.empty()) cli::check_config(o.config, o.set, o.strict);

  const Chosen chosen = choose_hosts(c, o, launch::gpu_slots());
  const bool several = chosen.hosts.size() > 1;
  if (o.module && !o.deepspeed)
    throw ConfigError(
        "[--module] got the option without --deepspeed, expected a program. Hint: zero run python -m MODULE");
  if (o.deepspeed)
    run_by_python(c, o, std::any_of(chosen.hosts.begin(), chosen.hosts.end(), [](auto& host) { return host.here; }));
  launch::LaunchSettings s;
  s.program = o.program;
  s.hosts = chosen.hosts;
  s.by_hand = chosen.by_hand;
  s.bind_cores = o.bind;
  s.core_list = o.core_list;
  s.master_address = chosen.master_address;
  s.master_port =
      o.master_port == 0 && (several || chosen.others) ? kPortOfSeveralHosts : static_cast<int>(o.master_port);
  s.shell = {o.launcher, static_cast<int>(o.ssh_port), launch::split_words(o.launcher_args, "--launcher-args")};
  s.exported = o.exported;
  s.host_timeout_s = o.host_timeout;
  s.log_folder = o.log_dir.empty() ? c.global().log_dir : o.log_dir;
  s.environment = read_env_file(o.env_file);
  if (!o.config.empty()) s.environment["ZERO_CONFIG"] = std::filesystem::absolute(o.config);
  s.pass_local_rank = o.pass_local_rank;
  s.grace_s = o.grace;
  s.stop_timeout_s = o.stop_timeout;
  s.hang_timeout_s = o.hang_timeout;
  s.max_restarts = static_cast<int>(o.restarts);
  take_least(c, o, s);

  Terminal terminal(o, c.global(), several);
  if (!o.set.empty()) terminal.notice(LogLevel::Warning, "--set is only checked here: give it to the program, too");
  if (o.no_local_rank && !o.deepspeed)
    terminal.notice(LogLevel::Warning,
                    "--no_local_rank has no effect: --local_rank is only appended with "
                    "--pass-local-rank");
  for (const std::string& notice : c.notices()) terminal.notice(LogLevel::Warning, notice);
  for (const char* folder : {static_cast<const char*>(std::getenv("HOME")), "."})
    if (folder && access((std::string(folder) + "/.deepspeed_env").c_str(), F_OK) == 0)
      terminal.notice(LogLevel::Warning, std::string(folder) + "/.deepspeed_env is not read: use --env-file");
  launch::Launcher launcher(s, terminal);
  const PidFile pid_file(o.save_pid);
  std::string first =
      "ranks: " + std::to_string(launcher.ranks()) + " on " + place_of(chosen) + " from " + chosen.source;
  if (several) first += ", meeting at " + s.master_address + ":" + std::to_string(s.master_port);
  first += ", run " + launcher.run_id();
  if (launcher.omp_threads() > 0) first += ", OMP_NUM_THREADS=" + std::to_string(launcher.omp_threads());
  terminal.notice(LogLevel::Info, first);

  const launch::LaunchResult result = launcher.run();
  int code = result.exit_code;
  if (code == 0 && terminal.out_error() != 0 && terminal.out_error() != EPIPE) {
    cli::print_error("run", std::string("[stdout] got ") + std::strerror(terminal.out_error()) +
                                ", expected to write the ranks' lines");
    code = static_cast<int>(ExitCode::kIo);
  }
  if (c.global().json) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.3f", result.seconds);
    const auto& reports = terminal.reports();
    std::string document = "{\"schema\": \"zero.run/1\", ";
    if (code != 0 && !reports.empty()) {  // the last failure's fields become top-level fields
      document += reports.back().substr(1, reports.back().size() - 2);
    } else {
      document += "\"exit_code\": " + std::to_string(code) + ", \"run_id\": " + base::json_quote(result.run_id);
    }
    document += ", \"ranks\": " + std::to_string(result.ranks) + ", \"attempts\": " + std::to_string(result.attempts) +
                ", \"seconds\": " + seconds + ", \"failures\": [";
    for (std::size_t i = 0; i < reports.size(); ++i) document += (i ? ", " : "") + reports[i];
    document += "], \"restarts\": [";
    for (std::size_t i = 0; i < result.restarts.size(); ++i) {
      const launch::Restart& restart = result.restarts[i];
      document += (i ? ", " : "") + std::string("{\"ranks\": ") + std::to_string(restart.ranks) +
                  ", \"previous_ranks\": " + std::to_string(restart.was) +
                  ", \"left_out\": " + (restart.left_out.empty() ? "null" : base::json_quote(restart.left_out)) + "}";
    }
    cli::print_result(document + "]}\n");
  }
  return code;
}
