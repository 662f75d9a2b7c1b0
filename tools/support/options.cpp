// Words are assigned to options and positionals first (names, values, similar names, repetitions); then the values are
// converted and checked, in the order of the declarations.
#include "tools/support/options.h"

#include <zero/version.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <sstream>

#include <zero/config_tools.h>
#include "tools/report/text/table.h"

namespace zero::cli {
namespace {

std::string dashes(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

std::string shown(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

std::vector<std::string> parts_of(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

std::string joined(const std::vector<std::string>& words, const char* separator) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : separator) + word;
  return text;
}

// The whole text as a number, with an optional sign.
template <class Number>
bool is_number(std::string_view text, Number& number) {
  if (text.starts_with('+')) text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

std::string quoted_word(std::string_view word) {
  return "\"" + std::string(word.substr(0, 80)) + (word.size() > 80 ? "..." : "") + "\"";
}

std::int64_t whole_number(const std::string& key, const std::string& text, std::int64_t least, std::int64_t most) {
  std::int64_t number = 0;
  if (!is_number(text, number) || number < least || number > most)
    throw ConfigError("[" + key + "] got " + quoted_word(text) + ", expected a whole number from " +
                      std::to_string(least) + " to " + std::to_string(most));
  return number;
}

}  // namespace

struct Command::State {
  struct Option {
    std::string key;  // the canonical long name, with dashes
    std::vector<std::string> names;
    std::string value_name, help, refusal, no_effect;
    bool repeated = false, hidden = false, list = false;
    bool seen = false;
    std::vector<std::string> values;                           // as written; one, "" for a flag, unless repeated
    std::function<void(const std::vector<std::string>&)> set;  // converts and checks them
  };
  struct Heading {
    std::size_t first_option;
    std::string title;
  };
  struct Positional {
    std::string name, help;
    std::string* one = nullptr;  // or the rest of the words
    std::vector<std::string>* rest = nullptr;
    bool required = false;
  };
  std::vector<std::unique_ptr<Option>> options;
  std::map<std::string, Option*> by_name;
  std::vector<Heading> headings;
  std::vector<Positional> positionals;

  Option* find(const std::string& name) {
    const auto found = by_name.find(name);
    return found == by_name.end() ? nullptr : found->second;
  }
  Option& last() { return *options.back(); }
};

Command::Command(std::string name, std::string summary, std::string usage, std::string example)
    : name_(std::move(name)),
      summary_(std::move(summary)),
      usage_(std::move(usage)),
      example_(std::move(example)),
      state_(std::make_unique<State>()) {}

Command::~Command() = default;

void Command::add(const std::string& names, const std::string& value_name, const std::string& help, bool repeated,
                  bool hidden) {
  auto option = std::make_unique<State::Option>();
  option->value_name = value_name;
  option->help = help;
  option->repeated = repeated;
  option->hidden = hidden;
  for (const std::string& each : parts_of(names, ',')) {
    option->names.push_back(each);
    if (option->key.empty() && each.substr(0, 2) == "--") option->key = each;
    state_->by_name[each] = option.get();
  }
  state_->options.push_back(std::move(option));
}

void Command::flag(const std::string& names, bool& value, const std::string& help) {
  add(names, "", help, false, false);
  state_->last().set = [&value](const auto&) { value = true; };
}

void Command::option(const std::string& names, std::string& value, const std::string& value_name,
                     const std::string& help) {
  add(names, value_name, help, false, false);
  state_->last().set = [&value](const auto& all) { value = all.back(); };
}

void Command::option(const std::string& names, std::int64_t& value, const std::string& value_name,
                     const std::string& help, std::int64_t least, std::int64_t most) {
  add(names, value_name, help, false, false);
  state_->last().set = [&value, key = state_->last().key, least, most](const auto& all) {
    value = whole_number(key, all.back(), least, most);
  };
}

void Command::option(const std::string& names, double& value, const std::string& value_name, const std::string& help,
                     double least, double most) {
  add(names, value_name, help, false, false);
  state_->last().set = [&value, key = state_->last().key, least, most](const auto& all) {
    double number = 0;
    if (!is_number(all.back(), number) || !std::isfinite(number) || number < least || number > most)
      throw ConfigError("[" + key + "] got " + quoted_word(all.back()) + ", expected a number from " + shown(least) +
                        " to " + shown(most));
    value = number;
  };
}

void Command::choice(const std::string& names, std::string& value, const std::vector<std::string>& allowed,
                     const std::string& help) {
  add(names, joined(allowed, "|"), help, false, false);
  state_->last().set = [&value, key = state_->last().key, allowed](const auto& all) {
    const auto& text = all.back();
    if (std::find(allowed.begin(), allowed.end(), text) == allowed.end()) {
      const std::string near = nearest_name(text, allowed);
      throw ConfigError("[" + key + "] got " + quoted_word(text) + ", expected one of " + joined(allowed, ", ") +
                        (near.empty() ? "" : ". Hint: did you mean \"" + near + "\"?"));
    }
    value = text;
  };
}

void Command::numbers(const std::string& names, std::vector<std::int64_t>& values, const std::string& value_name,
                      const std::string& help, std::int64_t least, std::int64_t most) {
  add(names, value_name, help, false, false);
  state_->last().list = true;
  state_->last().set = [&values, key = state_->last().key, least, most](const auto& all) {
    values.clear();
    for (const auto& text : all) values.push_back(whole_number(key, text, least, most));
  };
}

void Command::repeated(const std::string& names, std::vector<std::string>& values, const std::string& value_name,
                       const std::string& help) {
  add(names, value_name, help, true, false);
  state_->last().set = [&values](const auto& all) { values = all; };
}

void Command::no_effect(const std::string& names, bool takes_value, const std::string& reason) {
  add(names, takes_value ? "VALUE" : "", "", true, true);
  state_->last().no_effect = reason;
}

void Command::refused(const std::string& names, bool takes_value, const std::string& reason) {
  add(names, takes_value ? "VALUE" : "", "", true, true);
  state_->last().refusal = reason;
}

void Command::section(const std::string& title) { state_->headings.push_back({state_->options.size(), title}); }

void Command::positional(std::string& value, const std::string& value_name, const std::string& help, bool required) {
  state_->positionals.push_back({.name = value_name, .help = help, .one = &value, .required = required});
}

void Command::positionals(std::vector<std::string>& values, const std::string& value_name, const std::string& help,
                          bool required) {
  state_->positionals.push_back({.name = value_name, .help = help, .rest = &values, .required = required});
}

void Command::trailing(std::vector<std::string>& words, const std::string& value_name, const std::string& help) {
  state_->positionals.push_back({.name = value_name, .help = help});
  trailing_ = &words;
}

void Command::config(std::string& file, std::vector<std::pair<std::string, std::string>>& set, bool& strict) {
  option("-c,--config,--deepspeed-config", file, "FILE", "configuration (DeepSpeed's JSON)");
  repeated("--set", set_texts_, "KEY=VALUE", "set one key, dotted: zero_optimization.stage=2");
  flag("--strict", strict, "treat notices as errors");
  set_ = &set;
}

std::vector<std::string> Command::assign(const std::vector<std::string>& words) {
  std::vector<std::string> positionals, names;
  for (const auto& [name, option] : state_->by_name)
    if (name.size() > 2 && option->refusal.empty()) names.push_back(name);
  const auto unknown = [&](const std::string& word) {
    std::string near = nearest_name(dashes(word), names);
    if (near.empty())  // "--gups" for "--num-gpus": a part of a name
      for (const std::string& name : names)
        for (const std::string& part : parts_of(name, '-'))
          if (near.empty() && part.size() >= 4 && word.size() >= 5 &&
              !nearest_name(dashes(word).substr(2), {part}).empty())
            near = name;
    throw ConfigError("[" + word.substr(0, 80) + "] got an unknown option, expected one of `" + words_of(name_) +
                      " --help`" + (near.empty() ? "" : ". Hint: did you mean " + near + "?"));
  };
  const auto is_name = [](const std::string& word) {
    const bool negative =
        word.size() > 1 && word[0] == '-' && (std::isdigit(static_cast<unsigned char>(word[1])) || word[1] == '.');
    return word.size() >= 2 && word[0] == '-' && !negative;
  };
  const auto take = [&](State::Option& option, const std::string& written, const std::string* value) {
    if (!option.refusal.empty())
      throw ConfigError("[" + written + "] got an option that is refused, expected none such: " + option.refusal);
    if (option.seen && !option.repeated)
      throw ConfigError("[" + option.key + "] got the option twice, expected it once");
    option.seen = true;
    if (!option.no_effect.empty()) {
      notices_.push_back(written + " has no effect: " + option.no_effect);
    } else {
      option.values.push_back(value ? *value : "");
    }
  };
  std::size_t i = 0;
  const auto value_of = [&](const State::Option& option, const std::string& written) {
    if (i + 1 < words.size()) {
      const std::string& next = words[i + 1];
      const bool is_option = next == "--" || (next.size() > 2 && next.substr(0, 2) == "--" &&
                                              state_->find(dashes(next.substr(0, next.find('=')))));
      if (!is_option) return words[++i];
    }
    throw ConfigError("[" + written + "] got no value, expected " + option.value_name);
  };
  for (; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--") {
      ++i;
      break;
    }
    if (!is_name(word)) {
      if (trailing_) break;
      positionals.push_back(word);
    } else if (word[1] == '-') {
      const std::size_t equals = word.find('=');
      const std::string written = word.substr(0, equals);
      State::Option* option = state_->find(dashes(written));
      if (!option) unknown(written);
      if (equals != std::string::npos) {
        if (option->value_name.empty())
          throw ConfigError("[" + written + "] got " + quoted_word(word.substr(equals + 1)) + ", expected no value");
        const std::string value = word.substr(equals + 1);
        take(*option, written, &value);
      } else if (option->value_name.empty()) {
        take(*option, written, nullptr);
      } else {
        const std::string value = value_of(*option, written);
        take(*option, written, &value);
        while (option->list && i + 1 < words.size() && !is_name(words[i + 1])) option->values.push_back(words[++i]);
      }
    } else {
      for (std::size_t at = 1; at < word.size(); ++at) {
        const std::string written = {'-', word[at]};
        State::Option* option = state_->find(written);
        if (!option) unknown(at == 1 ? word : written);
        if (option->value_name.empty()) {
          take(*option, written, nullptr);
          continue;
        }
        std::string value = word.substr(at + 1);
        if (!value.empty() && value[0] == '=') value.erase(0, 1);
        if (at + 1 == word.size()) value = value_of(*option, written);
        take(*option, written, &value);
        break;
      }
    }
  }
  if (trailing_) {
    trailing_->assign(words.begin() + static_cast<std::ptrdiff_t>(std::min(i, words.size())), words.end());
  } else {
    for (; i < words.size(); ++i) positionals.push_back(words[i]);
  }
  return positionals;
}

void Command::set_positionals(const std::vector<std::string>& words) {
  auto next = words.begin();
  for (auto& positional : state_->positionals) {
    if (!positional.one && !positional.rest) continue;  // trailing words
    if (next == words.end()) {
      if (positional.required)
        throw ConfigError("[" + words_of(name_) + "] got no " + positional.name +
                          ", expected one. Hint: " + words_of(name_) + " --help");
      continue;
    }
    if (positional.one) {
      *positional.one = *next++;
    } else {
      positional.rest->assign(next, words.end());
      next = words.end();
    }
  }
  if (next != words.end())
    throw ConfigError("[" + words_of(name_) + "] got " + quoted_word(*next) +
                      ", expected no further word. Hint: " + words_of(name_) + " --help");
}

bool Command::parse(int argc, char** argv) {
  section("Everywhere");
  flag("-h,--help", help_, "this text");
  flag("--version", version_, "version of zero");
  flag("-q,--quiet", global_.quiet, "errors only");
  flag("-v,--verbose", global_.verbose, "more, for finding faults");
  choice("--log-level", global_.log_level, {"debug", "info", "warning", "error"}, "lowest level shown on stderr");
  if (reports_) {
    // Commands may declare their own --log-dir with more names.
    if (!state_->find("--log-dir")) option("--log-dir", global_.log_dir, "DIR", "folder for log files");
    flag("--json", global_.json, "one JSON document on stdout");
    choice("--color", color_, {"auto", "always", "never"}, "colour");
    choice("--progress", progress_, {"auto", "always", "never"}, "progress line on stderr");
  }

  const std::vector<std::string> words(argv + 1, argv + argc);
  const auto positionals = assign(words);
  const auto asked = [&](const char* name) { return state_->find(name)->seen; };
  if (asked("--help") || asked("--version")) {
    print_result(asked("--help") ? help() : "zero " ZERO_VERSION "\n");
    return false;
  }
  for (const auto& option : state_->options)
    if (option->set && !option->values.empty()) option->set(option->values);
  set_positionals(positionals);
  if (trailing_ && trailing_->empty())
    throw ConfigError("[" + words_of(name_) + "] got no " + state_->positionals.front().name +
                      ", expected one. Hint: " + words_of(name_) + " --help");
  const auto to_choice = [](const std::string& text) {
    return text == "always" ? report::Choice::Always : text == "never" ? report::Choice::Never : report::Choice::Auto;
  };
  global_.color = to_choice(color_);
  global_.progress = to_choice(progress_);
  if (global_.log_dir.empty())
    if (const char* folder = std::getenv("ZERO_LOG_DIR")) global_.log_dir = folder;
  for (const std::string& text : set_texts_) {
    const std::size_t equals = text.find('=');
    if (equals == 0 || equals == std::string::npos)
      throw ConfigError("[--set] got " + quoted_word(text) + ", expected KEY=VALUE");
    set_->emplace_back(text.substr(0, equals), text.substr(equals + 1));
  }
  install_log_sink(name_, global_);
  return true;
}

bool Command::given(const std::string& name) const {
  const State::Option* option = state_->find(name);
  return option && option->seen;
}

std::string Command::help() const {
  constexpr std::size_t kWidth = 80, kIndent = 26;
  std::string out;
  for (const std::string& line : report::wrap(words_of(name_) + ": " + summary_, kWidth)) out += line + "\n";
  out += "\nUsage: " + words_of(name_) + " " + usage_ + "\n";
  const auto entry = [&](const std::string& left, const std::string& help) {
    std::string line = "  " + left;
    const std::vector<std::string> lines = report::wrap(help, kWidth - kIndent);
    std::size_t first = 0;
    if (line.size() + 2 <= kIndent) {
      line.append(kIndent - line.size(), ' ').append(lines[0]);
      first = 1;
    }
    out += line + "\n";
    for (std::size_t i = first; i < lines.size(); ++i) out += std::string(kIndent, ' ') + lines[i] + "\n";
  };
  if (!state_->positionals.empty()) out += "\n";
  for (const auto& positional : state_->positionals) entry(positional.name, positional.help);
  std::size_t heading = 0;
  if (state_->headings.empty() || state_->headings[0].first_option > 0) out += "\nOptions\n";
  for (std::size_t i = 0; i < state_->options.size(); ++i) {
    const State::Option& option = *state_->options[i];
    while (heading < state_->headings.size() && state_->headings[heading].first_option <= i)
      out += "\n" + state_->headings[heading++].title + "\n";
    if (option.hidden) continue;
    std::string left, also;
    for (const std::string& name : option.names) {
      if (name.size() == 2) {
        left = name + ", ";
      } else if (name != option.key) {
        also += (also.empty() ? " (also " : ", ") + name;
      }
    }
    left += option.key;
    if (!option.value_name.empty()) left += " " + option.value_name;
    entry(left, option.help + also + (also.empty() ? "" : ")"));
  }
  return out + "\nExample\n" + example_;
}

}  // namespace zero::cli
