// The report layer's text: units, widths, tables that fit, the progress line, plots, step lines.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include <zero/errors.h>

#include "tools/report/text/plot.h"
#include "tools/report/text/progress.h"
#include "tools/report/text/step_line.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"

namespace zero::report::report_test {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST(Text, HumanBytes) {
  EXPECT_EQ(human_bytes(0), "0B");
  EXPECT_EQ(human_bytes(1023), "1023B");
  EXPECT_EQ(human_bytes(1024), "1.00KiB");
  EXPECT_EQ(human_bytes(1536), "1.50KiB");
  EXPECT_EQ(human_bytes((1ull << 20) - 1), "1.00MiB");
  EXPECT_EQ(human_bytes(10157597000ull), "9.46GiB");
  EXPECT_EQ(human_bytes(100ull << 30), "100GiB");
  EXPECT_EQ(human_bytes(~0ull), "16.0EiB");
}

TEST(Text, HumanDurationAndCount) {
  EXPECT_EQ(human_duration(0), "0us");
  EXPECT_EQ(human_duration(0.00085), "850us");
  EXPECT_EQ(human_duration(0.0131), "13ms");
  EXPECT_EQ(human_duration(0.9996), "1.0s");
  EXPECT_EQ(human_duration(59.96), "1m00s");
  EXPECT_EQ(human_duration(190), "3m10s");
  EXPECT_EQ(human_duration(3599.6), "1h00m");
  EXPECT_EQ(human_duration(3725), "1h02m");
  EXPECT_EQ(human_duration(86399.9), "1d00h");
  EXPECT_EQ(human_duration(2 * 86400 + 3 * 3600), "2d03h");
  EXPECT_EQ(human_duration(-1), "?");
  EXPECT_EQ(human_duration(NAN), "?");
  EXPECT_EQ(human_count(7), "7");
  EXPECT_EQ(human_count(0.5), "0.50");
  EXPECT_EQ(human_count(999.7), "1.00k");
  EXPECT_EQ(human_count(29.5e6), "29.5M");
  EXPECT_EQ(human_parameters(7.5e9), "7.50B");
  EXPECT_EQ(human_parameters(355e6), "355M");
}

TEST(Text, WidthOfUtf8) {
  EXPECT_EQ(display_width("abc"), 3u);
  EXPECT_EQ(display_width("\u00e9"), 1u);
  EXPECT_EQ(display_width("e\u0301"), 1u);
  EXPECT_EQ(display_width("\ud55c\uad6d"), 4u);
  EXPECT_EQ(display_width("\U0001f600"), 2u);
  EXPECT_EQ(display_width("\xff\xfe"), 2u);
  EXPECT_EQ(display_width("a\x1b[0m"), 4u);
  EXPECT_EQ(prefix_of_width("\ud55c\uad6d", 3), "\ud55c");
  EXPECT_EQ(fit("abcdef", 4), "abc\u2026");
  EXPECT_EQ(fit("abcdef", 4, Align::Left, false), "ab..");
  EXPECT_EQ(fit("\ud55c\uad6d\uc5b4", 4), "\ud55c\u2026 ");
  EXPECT_EQ(fit("7", 3, Align::Right), "  7");
  EXPECT_EQ(fit("abc", 1, Align::Left, false), "a");
}

Table sample() {
  Table t({{"stage", Align::Right}, {"what it does", Align::Left, Column::Narrow::Wrap}, {"bytes", Align::Right}});
  t.row({"0", "everything is replicated on every rank", "1024"});
  t.row({"3", "\ud30c\ub77c\ubbf8\ud130 sharded", "8"});
  return t;
}

TEST(Table, AlignsByWidthNotByBytes) {
  EXPECT_EQ(sample().render(80),
            "stage  what it does                            bytes\n"
            "    0  everything is replicated on every rank   1024\n"
            "    3  \ud30c\ub77c\ubbf8\ud130 sharded                            8\n");
}

TEST(Table, EveryLineFits) {
  for (std::size_t columns : {30u, 36u, 44u, 52u, 80u}) {
    const std::string text = sample().render(columns);
    for (const std::string& line : lines_of(text)) EXPECT_LE(display_width(line), columns) << text;
    EXPECT_NE(text.find("1024"), std::string::npos) << "numbers are never cut";
    std::string words;
    for (char c : text)
      if (c != ' ' && c != '\n') words += c;
    if (columns >= 52) continue;
    EXPECT_GT(lines_of(text).size(), 3u) << "wrapped";
  }
}

TEST(Table, CutColumnsAndRules) {
  Table t({{"name", Align::Left, Column::Narrow::Cut, 6}, {"n", Align::Right}});
  t.row({"a-rather-long-name", "1"});
  t.rule();
  t.row({"sum", "1"});
  EXPECT_EQ(t.render(12), "name       n\na-rathe..  1\n------------\nsum        1\n");
}

TEST(Table, TooNarrowBecomesRecords) {
  Table t({{"left", Align::Left}, {"right", Align::Right}});
  t.row({"aaaaaaaaaaaa", "123456789"});
  t.row({"b", "2"});
  EXPECT_EQ(t.render(20), "left   aaaaaaaaaaaa\nright  123456789\n\nleft   b\nright  2\n");
}

TEST(Table, WrapBreaksLongWords) {
  EXPECT_EQ(wrap("ab cdefghij k", 4), (std::vector<std::string>{"ab", "cdef", "ghij", "k"}));
  EXPECT_EQ(wrap("", 4), std::vector<std::string>{""});
}

struct Screen {
  std::string bytes;
  std::vector<std::string> writes;
  double now = 100;
  ProgressLine::Settings settings(bool dumb = false) {
    ProgressLine::Settings s;
    s.enabled = true;
    s.dumb = dumb;
    s.columns = 60;
    s.write = [this](std::string_view b) {
      writes.emplace_back(b);
      bytes += b;
    };
    s.clock = [this] { return now; };
    return s;
  }
  // What a terminal would show after all bytes: the lines above, and the current line.
  std::vector<std::string> shown() const {
    std::vector<std::string> lines{""};
    std::size_t at = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (bytes.compare(i, 3, "\033[K") == 0) {
        lines.back().resize(at);
        i += 2;
      } else if (bytes[i] == '\r') {
        at = 0;
      } else if (bytes[i] == '\n') {
        lines.emplace_back();
        at = 0;
      } else {
        if (at < lines.back().size())
          lines.back()[at] = bytes[i];
        else
          lines.back() += bytes[i];
        ++at;
      }
    }
    return lines;
  }
};

TEST(Progress, AtMostTenRedrawsASecond) {
  Screen screen;
  ProgressLine p(screen.settings());
  for (int i = 0; i < 1000; ++i) {
    screen.now = 100 + i * 0.001;
    p.update(i, 1000);
  }
  EXPECT_LE(screen.writes.size(), 10u);
  EXPECT_GE(screen.writes.size(), 9u);
}

TEST(Progress, ShowsRateAndTimeLeft) {
  Screen screen;
  ProgressLine p(screen.settings());
  for (int i = 0; i <= 20; ++i) {
    screen.now = 100 + i * 0.5;  // two a second
    p.update(i, 40, "loss 3.2");
  }
  EXPECT_EQ(screen.shown().back(), "[##########..........] 20/40 50% 2/s eta 10.0s loss 3.2");
}

TEST(Progress, NamesItsUnitAndEndsWithTheTimeLeft) {
  Screen screen;
  ProgressLine::Settings settings = screen.settings();
  settings.unit = "step";
  ProgressLine p(settings);
  for (int i = 0; i <= 20; ++i) {
    screen.now = 100 + i * 0.5;
    p.update(i, 40, "loss 3.2");
  }
  EXPECT_EQ(screen.shown().back(), "[##########..........] step 20/40 50%  loss 3.2  eta 10.0s");
}

TEST(Progress, WipedBeforeLogLinesAndAtTheEnd) {
  for (bool dumb : {false, true}) {
    Screen screen;
    {
      ProgressLine p(screen.settings(dumb));
      p.update(1, 10);
      p.print("a log line");
      screen.now += 1;
      p.update(2, 10);
      p.print("another\n");
      screen.now += 1;
      p.update(3, 10, "x");
    }
    std::vector<std::string> lines = screen.shown();
    for (std::string& line : lines) line.erase(line.find_last_not_of(' ') + 1);
    EXPECT_EQ(lines, (std::vector<std::string>{"a log line", "another", ""})) << dumb;
    if (dumb) {
      EXPECT_EQ(screen.bytes.find('\033'), std::string::npos);
    }
  }
}

TEST(Progress, NeverReachesTheLastColumnAndDisabledDrawsNothing) {
  Screen screen;
  ProgressLine p(screen.settings());
  p.update(1, 10, std::string(200, 'x'));
  EXPECT_EQ(screen.shown().back().size(), 59u);
  Screen silent;
  ProgressLine::Settings off = silent.settings();
  off.enabled = false;
  ProgressLine q(off);
  q.update(1, 10);
  q.print("line");
  q.finish();
  EXPECT_EQ(silent.bytes, "line\n");
}

TEST(Progress, OnlyRankZeroOnATerminal) {
  Terminal tty;
  tty.tty = true;
  EXPECT_TRUE(progress_wanted(tty, 0, Choice::Auto, false, false));
  EXPECT_FALSE(progress_wanted(tty, 1, Choice::Always, false, false));
  EXPECT_FALSE(progress_wanted(tty, 0, Choice::Always, true, false));
  EXPECT_FALSE(progress_wanted(tty, 0, Choice::Always, false, true));
  EXPECT_FALSE(progress_wanted(tty, 0, Choice::Never, false, false));
  EXPECT_FALSE(progress_wanted(Terminal{}, 0, Choice::Always, false, false)) << "no escape code reaches a file";
  tty.dumb = true;
  EXPECT_FALSE(progress_wanted(tty, 0, Choice::Auto, false, false));
  EXPECT_TRUE(progress_wanted(tty, 0, Choice::Always, false, false));
}

TEST(Terminal, EnvironmentDecides) {
  setenv("COLUMNS", "133", 1);
  setenv("LC_ALL", "ko_KR.UTF-8", 1);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  Terminal t = describe_terminal(ends[1]);
  EXPECT_EQ(t.columns, 133);
  EXPECT_TRUE(t.utf8);
  EXPECT_FALSE(t.tty);
  EXPECT_FALSE(t.color);
  EXPECT_TRUE(describe_terminal(ends[1], Choice::Always).color);
  setenv("LC_ALL", "C", 1);
  setenv("COLUMNS", "nonsense", 1);
  EXPECT_FALSE(describe_terminal(ends[1]).utf8);
  EXPECT_EQ(describe_terminal(ends[1]).columns, 80);
}

TEST(Plot, AsciiGolden) {
  PlotSettings s;
  s.columns = 20;
  s.height = 4;
  s.title = "loss";
  s.x_name = "step";
  EXPECT_EQ(line_plot({{"loss", {3, 2, 1, 0}, {}}}, s),
            "loss\n"
            "  3 |***\n"
            "    |   *****\n"
            "1.5 |        ****\n"
            "  0 |            ***\n"
            "    +---------------\n"
            "     0    step     3\n");
}

TEST(Plot, BrailleFollowsTheValues) {
  PlotSettings s;
  s.columns = 30;
  s.height = 5;
  s.utf8 = true;
  std::vector<double> y;
  for (int i = 0; i < 200; ++i) y.push_back(std::exp(-i / 40.0));
  const std::vector<std::string> lines = lines_of(line_plot({{"loss", y, {}}}, s));
  ASSERT_EQ(lines.size(), 7u);
  for (const std::string& line : lines) EXPECT_LE(display_width(line), 30u);
  // It falls: the first line's marks stand left of the last one's.
  const auto first_mark = [](const std::string& line) {
    const std::size_t bar = line.find("\u2502") + 3;
    return line.find_first_not_of(' ', bar) - bar;
  };
  EXPECT_EQ(first_mark(lines[0]), 0u);
  EXPECT_GT(first_mark(lines[4]), 5u);
  EXPECT_EQ(lines[0].find("1 \u2502"), lines[0].find("\u2502") - 2);
}

TEST(Plot, GapsSeveralSeriesAndNothing) {
  PlotSettings s;
  s.columns = 30;
  s.height = 3;
  const std::string two = line_plot({{"a", {1, 1, 1}, {}}, {"b", {2, NAN, 2}, {}}}, s);
  EXPECT_NE(two.find("* a   + b"), std::string::npos) << two;
  EXPECT_EQ(std::count(two.begin(), two.end(), '+'), 2 + 1 + 1) << "two points, a corner, a name; no line across NaN";
  EXPECT_EQ(line_plot({}, s), "(nothing to plot)\n");
  EXPECT_EQ(line_plot({{"a", {NAN, INFINITY}, {}}}, s), "(nothing to plot)\n");
  EXPECT_NE(line_plot({{"a", {5}, {}}}, s).find('*'), std::string::npos);
  EXPECT_THROW(line_plot({{"a", {5}, {1, 2}}}, s), InternalError);
}

TEST(StepLine, TheDocumentedForm) {
  StepRow r;
  r.step = 14, r.steps = 300, r.loss = 3.24405, r.grad_norm = 0.8319, r.lr = 3e-5, r.loss_scale = 65536, r.skipped = 0;
  r.memory_bytes = 10157597000ull, r.memory_limit_bytes = 15627072000ull, r.tokens_per_s = 7282;
  r.comm_part = 0.12, r.io_part = 0, r.eta_seconds = 190, r.step_seconds = 0.25;
  EXPECT_EQ(step_line(r),
            "step 14/300 loss 3.24405 grad_norm 0.8319 lr 3.0e-05 scale 65536 skipped 0 mem 9.46GiB (65%) 7282 tok/s "
            "comm 12% io 0% eta 3m10s");
  EXPECT_EQ(
      step_json(r),
      "{\"step\": 14, \"loss\": 3.24405, \"grad_norm\": 0.8319, \"lr\": 3e-05, \"loss_scale\": 65536, \"skipped\": 0, "
      "\"step_ms\": 250, \"tokens_per_s\": 7282, \"memory_bytes\": 10157597000, \"comm_part\": 0.12, \"io_part\": 0}");
  StepRow parts;
  parts.loss = 1, parts.bytes_sent = 1024, parts.eta_seconds = 2;
  parts.forward_seconds = 0.0031, parts.backward_seconds = 0.0062, parts.reduce_seconds = 0.0004,
  parts.update_seconds = 0.0015;
  parts.memory = {{"forward", 2048, 4096, 0, 0}, {"step", 1024, 2048, 512, 1024}};
  EXPECT_EQ(step_line(parts),
            "step 0 loss 1.00000 forward 3.1ms backward 6.2ms reduce 0.4ms update 1.5ms eta 2.0s\n"
            "  memory  after forward 2.00KiB peak 4.00KiB  after step 1.00KiB peak 2.00KiB host 512B peak 1.00KiB");
  EXPECT_EQ(
      step_json(parts),
      "{\"step\": 0, \"loss\": 1, \"bytes_sent\": 1024, \"forward_ms\": 3.1, \"backward_ms\": 6.2, \"reduce_ms\": 0.4, "
      "\"update_ms\": 1.5, \"memory\": {\"after_forward\": {\"bytes\": 2048, \"peak_bytes\": 4096, \"host_bytes\": 0, "
      "\"host_peak_bytes\": 0}, \"after_step\": {\"bytes\": 1024, \"peak_bytes\": 2048, \"host_bytes\": 512, "
      "\"host_peak_bytes\": 1024}}}");
  StepRow bare;
  bare.loss = NAN;
  EXPECT_EQ(step_line(bare), "step 0 loss nan");
  EXPECT_EQ(step_json(bare), "{\"step\": 0, \"loss\": null}");
}

TEST(StepLine, BytesOfAMesh) {
  StepRow r;
  r.loss = 1, r.bytes_sent = 60, r.sent_by_axis = AxisBytes{10, 20, 30, 40};
  EXPECT_EQ(step_json(r),
            "{\"step\": 0, \"loss\": 1, \"bytes_sent\": 60, \"zero_bytes_sent\": 10, "
            "\"tensor_parallel_bytes_sent\": 20, \"sequence_parallel_bytes_sent\": 30, "
            "\"expert_parallel_bytes_sent\": 40}");
}

// A group that is the whole world counts under its plain name.
TEST(AxisBytes, WhoseOperationItWas) {
  const struct {
    Degrees degrees;  // data, sequence, tensor, expert
    const char *counted, *operation;
  } rows[] = {
      {{4, 1, 1}, "all_gather", "all_gather"},
      {{4, 1, 1}, "all_to_all", "all_to_all"},
      {{1, 1, 4}, "all_reduce", "tp.all_reduce"},
      {{1, 1, 4}, "all_to_all", "tp.all_to_all"},
      {{1, 4, 1}, "all_to_all", "sp.all_to_all"},
      {{1, 4, 1}, "reduce_scatter", "reduce_scatter"},
      {{2, 2, 1}, "all_gather", "all_gather"},  // over dp_sp, which is the world
      {{2, 2, 1}, "sp.all_to_all", "sp.all_to_all"},
      {{2, 1, 2}, "dp.reduce_scatter", "reduce_scatter"},
      {{2, 1, 2}, "tp.all_reduce", "tp.all_reduce"},
      {{1, 2, 2}, "sp.all_gather", "all_gather"},  // ZeRO's, over the sequence-parallel ranks
      {{1, 2, 2}, "sp.all_to_all", "sp.all_to_all"},
      {{2, 2, 2}, "dp_sp.all_gather", "all_gather"},
      {{2, 2, 2}, "sp.all_gather", "sp.all_gather"},  // a program's own
      {{2, 2, 2}, "mine.all_gather", "mine.all_gather"},
      {{4, 1, 1, 4}, "all_to_all", "ep.all_to_all"},  // over all ranks
      {{4, 1, 1, 2}, "all_to_all", "all_to_all"},     // a program's own
      {{4, 1, 1, 2}, "ep.all_to_all", "ep.all_to_all"},
      {{4, 1, 1, 2}, "edp.reduce_scatter", "reduce_scatter"},
      {{2, 2, 1, 4}, "all_to_all", "ep.all_to_all"},
      {{1, 2, 1, 2}, "all_to_all", "sp.all_to_all"},  // of both
  };
  for (const auto& row : rows)
    EXPECT_EQ(operation_on_mesh(row.counted, row.degrees), row.operation)
        << degrees_text(row.degrees) << " " << row.counted;
  AxisBytes sent;
  for (const char* name : {"all_gather", "reduce_scatter", "tp.all_reduce", "sp.all_to_all", "ep.all_to_all",
                           "mine.all_gather", "control"})
    sent.add(name, 1024);
  EXPECT_EQ(sent, (AxisBytes{2048, 1024, 1024, 1024}));
  EXPECT_EQ(axes_text(sent, {2, 1, 2}), "ZeRO 2.00KiB, tensor parallelism 1.00KiB");
  EXPECT_EQ(axes_text(sent, {1, 2, 1}), "ZeRO 2.00KiB, sequence parallelism 1.00KiB");
  EXPECT_EQ(axes_text(sent, {4, 1, 1, 2}), "ZeRO 2.00KiB, expert parallelism 1.00KiB");
}

TEST(Table, NamesOfWrappingColumnsMayHaveLines) {
  Table table({{"DP"}, {"7.5B\nos+g", Align::Right, Column::Narrow::Wrap, 4}});
  table.row({"64", "16.6"});
  EXPECT_EQ(table.render(20), "DP  7.5B\n    os+g\n64  16.6\n");
  EXPECT_EQ(wrap("one two\nthree", 20), (std::vector<std::string>{"one two", "three"}));
}

}  // namespace
}  // namespace zero::report::report_test
