// `zero reproduce`: chooses experiments, runs one after the other, and writes what they found after each.
#include <algorithm>
#include <chrono>
#include <filesystem>

#include <zero/config_tools.h>

#include "base/check.h"
#include "lab/reproduce/experiments.h"
#include "lab/reproduce/pages.h"
#include "lab/reproduce/reproduce.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/options.h"
#include "tools/support/whole_file.h"

namespace zero::cli {

const std::vector<Experiment>& experiments() {
  static const std::vector<Experiment> all{
      {"homework", "Six configurations: bytes at four moments, 20 iterations", 0.7, 6, reproduce_homework},
      {"stages", "Model states by stage, and bytes sent", 0.2, 1, reproduce_stages},
      {"mixed-precision", "Bytes of a 16-bit copy, and the search of the loss scale", 0.1, 2,
       reproduce_mixed_precision},
      {"ddp-vs-fsdp", "DDP and FSDP by size, until DDP does not fit", 0.3, 10, reproduce_ddp_vs_fsdp},
      {"largest-model", "The largest model of each stage within one budget", 0.4, 8, reproduce_largest_model},
      {"offload", "The largest model with host memory and files", 0.8, 8, reproduce_offload},
      {"superlinear", "Speed of a rank when its batch grows with the number of ranks", 0.9, 7, reproduce_superlinear},
      {"checkpointing", "The largest batch with activations kept, computed again, and away", 2, 1,
       reproduce_checkpointing},
      {"delayed-update", "The loss with and without the delayed parameter update", 1.1, 4, reproduce_delayed_update},
      {"experts", "A larger model at the cost of a token: mixture of experts", 0.3, 8, reproduce_experts}};
  return all;
}

namespace {

namespace fs = std::filesystem;
constexpr const char* kName = "reproduce";

struct Arguments {
  std::vector<std::string> names;
  std::string out = "runs/reproduce", docs, from, text;
  bool quick = false;
};

std::vector<const Experiment*> chosen(const std::vector<std::string>& names) {
  std::vector<const Experiment*> all;
  std::vector<std::string> known{"all", "list"};
  for (const auto& one : experiments()) known.emplace_back(one.name);
  for (const auto& name : names) {
    const auto before = all.size();
    for (const auto& one : experiments())
      if ((name == "all" || name == one.name) && std::find(all.begin(), all.end(), &one) == all.end())
        all.push_back(&one);
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      const auto near = nearest_name(name, known);
      std::string text;
      for (const auto& one : known) text += (text.empty() ? "" : ", ") + one;
      throw ConfigError("[zero reproduce] got \"" + name.substr(0, 80) + "\", expected some of " + text +
                        (near.empty() ? "" : ". Hint: did you mean \"" + near + "\"?"));
    }
    if (all.size() == before)
      throw ConfigError("[zero reproduce] got \"" + name + "\" a second time" +
                        (name == "list" ? ", or with an experiment" : "") + ", expected each experiment once");
  }
  return all;
}

std::string list_text(std::size_t columns) {
  report::Table table({{"experiment"},
                       {"minutes", report::Align::Right},
                       {"what is compared", report::Align::Left, report::Column::Narrow::Wrap}});
  double sum = 0;
  for (const auto& one : experiments()) {
    table.row({one.name, fixed(one.minutes, 1), one.title});
    sum += one.minutes;
  }
  table.row({"all", fixed(sum, 1), "all of them, one after the other"});
  return "Minutes are of two idle cores. Run one with `zero reproduce NAME`.\n" + table.render(columns);
}

Json list_json() {
  Json all = Json::array();
  for (const auto& one : experiments())
    all.push_back({{"name", one.name}, {"title", one.title}, {"minutes", one.minutes}});
  return {{"schema", "zero.reproduce.list/1"}, {"experiments", all}};
}

// The records of earlier calls with the same folder stay, so that a page can be made in pieces.
void keep(std::vector<Record>& records, Record record) {
  const auto same =
      std::find_if(records.begin(), records.end(), [&](const Record& r) { return r.name == record.name; });
  if (same != records.end()) {
    *same = std::move(record);
    return;
  }
  records.push_back(std::move(record));
  const auto place = [](const Record& r) {
    const auto& all = experiments();
    return std::find_if(all.begin(), all.end(), [&](const Experiment& e) { return r.name == e.name; }) - all.begin();
  };
  std::stable_sort(records.begin(), records.end(),
                   [&](const Record& a, const Record& b) { return place(a) < place(b); });
}

void write_docs(const std::string& file, const std::vector<Record>& records) {
  const fs::path path(file);
  if (path.extension() != ".md") throw ConfigError("[--docs] got " + file + ", expected a file that ends in .md");
  const auto folder = path.parent_path();
  const auto page = docs_of(records, path.stem().string());
  for (const auto& [name, svg] : page.pictures) write_whole("--docs", (folder / name).string(), svg);
  write_whole("--docs", (folder / path.stem()).string() + ".json", document_of(records).dump(1) + "\n");
  write_whole("--docs", file, page.markdown);
}

Record run_one(const Experiment& experiment, const Arguments& arguments, Trials& trials, const std::string& command) {
  const auto begin = std::chrono::steady_clock::now();
  const double cpu = trials.cpu_seconds();
  const auto folder = fs::path(arguments.out) / experiment.name;
  fs::create_directories(folder);
  Study study{trials, arguments.quick, fs::absolute(folder).string(), arguments.text};
  trials.begin(experiment.name, arguments.quick ? 0 : experiment.trials);
  auto record = experiment.run(study);
  record.name = experiment.name, record.title = experiment.title;
  record.quick = arguments.quick;
  record.machine = machine();
  record.command = command;
  record.cpu_seconds = trials.cpu_seconds() - cpu;
  record.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return record;
}

// What was written, without the folders that are the user's own.
std::string command_of(const std::string& name, const Arguments& arguments) {
  return "zero reproduce " + name + (arguments.quick ? " --quick" : "") +
         (arguments.text.empty() ? "" : " --text " + fs::path(arguments.text).filename().string());
}

int reproduce(const Command& command, Arguments arguments) {
  const auto& global = command.global();
  const auto columns = static_cast<std::size_t>(report::describe_terminal(1, global.color).columns);
  if (!arguments.from.empty()) {
    if (!arguments.names.empty() || arguments.docs.empty())
      throw ConfigError("[--from] got " + arguments.from +
                        (arguments.docs.empty() ? " without --docs" : " and experiments") +
                        ", expected --docs PAGE alone: a page is made again from its JSON");
    write_docs(arguments.docs, read_records(arguments.from));
    return 0;
  }
  if (arguments.names.empty() || arguments.names == std::vector<std::string>{"list"}) {
    if (!arguments.docs.empty())
      throw ConfigError("[--docs] got no experiment, expected some or `all`. Hint: --from FILE makes a page again");
    print_result(global.json ? list_json().dump(2) + "\n" : list_text(columns));
    return 0;
  }
  const auto all = chosen(arguments.names);
  if (!arguments.text.empty()) {
    std::error_code error;
    if (!fs::is_regular_file(arguments.text, error))
      throw ConfigError("[--text] got " + arguments.text + ", expected a text file");
    arguments.text = fs::absolute(arguments.text).string();
  }
  std::error_code error;
  fs::create_directories(arguments.out, error);
  if (!fs::is_directory(arguments.out))
    throw IoError("[--out] got \"" + error.message() + "\" for " + arguments.out + ", expected a folder to write");
  const auto json = (fs::path(arguments.out) / "reproduction.json").string();
  std::vector<Record> records, now;
  if (fs::exists(json)) records = read_records(json);
  Trials trials(kName, global);
  int code = 0;
  for (const auto* experiment : all) {
    try {
      now.push_back(run_one(*experiment, arguments, trials, command_of(experiment->name, arguments)));
    } catch (const Stopped& stopped) {
      code = stopped.code;
      break;
    }
    keep(records, now.back());
    write_whole("--out", json, document_of(records).dump(1) + "\n");
    write_whole("--out", (fs::path(arguments.out) / "index.html").string(), html_of(records));
    if (!global.json && !print_result(text_of(now.back(), columns))) return 0;
  }
  if (code == 0 && !arguments.docs.empty()) write_docs(arguments.docs, records);
  if (global.json && code == 0) {
    print_result(document_of(now).dump(2) + "\n");
  } else if (!now.empty()) {
    print_note(kName, LogLevel::Info, "charts: " + arguments.out + "/index.html; exact figures: " + json);
  }
  return code;
}

}  // namespace
}  // namespace zero::cli

int zero_reproduce(int argc, char** argv) {
  using namespace zero::cli;
  Arguments arguments;
  Command command("reproduce", "the experiments of ZeRO's papers and of the documents about them, on this machine",
                  "[NAME...|all|list] [options]",
                  "  zero reproduce homework --out runs/homework\n"
                  "  zero reproduce all --docs docs/reproduction.md\n");
  command.positionals(arguments.names, "NAME", "experiments; all; list, or nothing: names and expected minutes", false);
  command.option("--out", arguments.out, "DIR", "charts, exact figures and the runs' folders (runs/reproduce)");
  command.flag("--quick", arguments.quick, "small sizes, in seconds: a check of the program, not of the claims");
  command.option("--text", arguments.text, "FILE", "text that the models are trained on (that of the GPL)");
  command.option("--docs", arguments.docs, "PAGE.md", "also write a page, its pictures next to it, and PAGE.json");
  command.option("--from", arguments.from, "FILE", "only write the page of --docs, from an earlier JSON file");
  if (!command.parse(argc, argv)) return 0;
  install_log_sink("reproduce", command.global());
  return reproduce(command, std::move(arguments));
}
