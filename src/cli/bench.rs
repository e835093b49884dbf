//! `parity bench`: how fast the instrumented engine is, beside a llama.cpp.

use std::path::PathBuf;
use std::process::ExitCode;

use comfy_table::{ContentArrangement, Table};

use super::output::print;
use super::progress::Progress;
use super::shared::{Format, FormatArgs};
use super::{Outcome, shared};
use crate::engine::device::Device;
use crate::jobs::bench::{Bench, BenchRow, Options, Speed, bench};
use crate::numerics::Numerics;
use crate::report::files::Folder;
use crate::report::json;

const EXAMPLES: &str = "\
Examples:
  parity bench -m model.gguf --device cuda --numerics f16
  parity bench -m model.gguf --llama ~/llama.cpp/build/bin --report speed";

/// Flags of `parity bench`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// GGUF model file [default: the one that ships with parity]
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// auto, cpu, cuda, cuda:N, or several
    ///
    /// cuda:0,cuda:1 and cuda:all split the layers over
    /// several GPUs.
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: Device,
    /// Arithmetic: f32, or f16 (tensor cores)
    #[arg(long, value_name = "WORDS", default_value = "f32")]
    numerics: Numerics,
    /// Lengths of the prefills, in tokens
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [16, 128, 512], value_parser = shared::at_least_one())]
    prefill: Vec<usize>,
    /// Positions in the cache before decoding
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [8, 1024], value_parser = shared::at_least_one())]
    context: Vec<usize>,
    /// Measurements of each
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = shared::at_least_one())]
    repeats: usize,
    /// Also measure the llama.cpp in this folder
    ///
    /// The folder holds libllama.so and libggml*.so. Its runs alternate with the engine's. Needs a C compiler, `cc`.
    #[arg(long, value_name = "DIR")]
    llama: Option<PathBuf>,
    /// Threads [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    #[command(flatten)]
    format: FormatArgs<Format>,
    /// Also write bench.json and bench.svg here
    ///
    /// The picture shows decode speed against context length.
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    let folder = args.report.as_deref().map(Folder::create).transpose()?;
    let file = shared::model_file(args.model.as_deref())?;
    let model = file.nodes()?;
    let options = Options {
        device: args.device.clone(),
        numerics: args.numerics,
        prompts: args.prefill.clone(),
        contexts: args.context.clone(),
        repeats: args.repeats,
        llama: args.llama.clone(),
    };
    let progress = Progress::new("measuring");
    let found = bench(model, &options, &|done, all| progress.set(done, all))?;
    drop(progress);
    if let Some(folder) = folder {
        folder.write_file("bench.json", &json::render(&found)?)?;
        folder.write_file("bench.svg", &plot(&found))?;
    }
    print(&match args.format.format() {
        Format::Json => json::render(&found)?,
        Format::Table => table(&found),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn table(found: &Bench) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    let mut head = vec!["tokens/s", "", "no checkpoint", "every checkpoint", "bandwidth"];
    let beside = found.rows.iter().any(|row| row.llama.is_some());
    if beside {
        head.extend(["llama.cpp", "every node asked for"]);
    }
    table.set_header(head);
    for row in &found.rows {
        let mut cells = vec![
            row.what.to_owned(),
            row.tokens.to_string(),
            speed(&row.untraced),
            speed(&row.traced),
            format!("{:.0} %", 100.0 * row.bandwidth_share),
        ];
        if beside {
            let llama = row.llama.map(|llama| llama.map(|found| speed(&found)));
            cells.extend(llama.unwrap_or_else(|| ["–".to_owned(), "–".to_owned()]));
        }
        table.add_row(cells);
    }
    let memory = found.memory.map_or_else(String::new, |memory| {
        let llama =
            memory.llama.map_or_else(String::new, |llama| format!(", llama.cpp {}", megabytes(llama)));
        format!("\nGPU memory with {} positions: {}{llama}\n", memory.positions, megabytes(memory.bytes))
    });
    format!(
        "{} on {} in {}: {:.0} MB of weights, {:.1} GB/s copied (read and written)\n\n{table}\n{memory}",
        found.model,
        found.device,
        found.numerics,
        found.weight_bytes as f64 / 1e6,
        found.bandwidth / 1e9
    )
}

fn megabytes(bytes: u64) -> String {
    format!("{:.0} MB", bytes as f64 / 1e6)
}

/// Median, and half of what lies between the slowest and the fastest, in percent of it.
fn speed(found: &Speed) -> String {
    let spread = 50.0 * (found.max - found.min) / found.median;
    let digits = if found.median < 100.0 { 1 } else { 0 };
    format!("{:.digits$} ±{spread:.0}%", found.median)
}

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 320.0;
const MARGIN: f64 = 56.0;
/// Width of one name in the legend.
const LEGEND: f64 = 120.0;

/// Decode speed against the positions before it, on a logarithmic axis, as SVG.
fn plot(found: &Bench) -> String {
    let mut rows: Vec<&BenchRow> = found.rows.iter().filter(|row| row.what == "decode").collect();
    rows.sort_by_key(|row| row.tokens);
    type Line = (&'static str, &'static str, fn(&BenchRow) -> Option<Speed>);
    let lines: [Line; 4] = [
        ("no checkpoint", "#1f5fbf", |row| Some(row.untraced)),
        ("every checkpoint", "#bf5f1f", |row| Some(row.traced)),
        ("llama.cpp", "#404040", |row| row.llama.map(|[untapped, _]| untapped)),
        ("llama.cpp, every node", "#a0a0a0", |row| row.llama.map(|[_, tapped]| tapped)),
    ];
    let speeds = rows.iter().flat_map(|row| lines.iter().filter_map(|(.., of)| of(row)));
    let most = speeds.map(|speed| speed.median).fold(1.0, f64::max);
    let log = |tokens: usize| (tokens.max(1) as f64).log2();
    let (first, last) =
        (rows.first().map_or(0.0, |row| log(row.tokens)), rows.last().map_or(0.0, |row| log(row.tokens)));
    let x = |tokens: usize| MARGIN + (WIDTH - 2.0 * MARGIN) * (log(tokens) - first) / (last - first).max(1.0);
    let y = |speed: f64| HEIGHT - MARGIN - (HEIGHT - 2.0 * MARGIN) * speed / most;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
         <text x=\"{MARGIN}\" y=\"20\">decode, tokens a second, by positions before: {} in {}</text>\n",
        escaped(&found.model),
        escaped(&found.numerics)
    );
    let mut at = MARGIN;
    for (name, colour, of) in lines {
        let points: Vec<(f64, f64)> =
            rows.iter().filter_map(|row| Some((x(row.tokens), y(of(row)?.median)))).collect();
        if points.is_empty() {
            continue;
        }
        let line: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        svg += &format!(
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{}\"/>\n",
            line.join(" ")
        );
        for (x, y) in points {
            svg += &format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>\n");
        }
        svg += &format!("<text x=\"{at}\" y=\"38\" fill=\"{colour}\">{name}</text>\n");
        at += LEGEND;
    }
    for row in &rows {
        let at = x(row.tokens);
        svg += &format!(
            "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
            HEIGHT - MARGIN + 20.0,
            row.tokens
        );
    }
    svg += &format!(
        "<text x=\"4\" y=\"{:.1}\">{most:.0}</text>\n<text x=\"4\" y=\"{:.1}\">0</text>\n</svg>\n",
        y(most),
        y(0.0)
    );
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_each_line_where_it_was_measured() {
        let speed = |median| Speed { median, min: median, max: median };
        let row = |what, tokens, llama: Option<f64>| BenchRow {
            what,
            tokens,
            untraced: speed(100.0),
            traced: speed(50.0),
            llama: llama.map(|median| [speed(median), speed(25.0)]),
            bandwidth_share: 0.5,
        };
        let found = Bench {
            schema: "parity-bench/1",
            model: "a<b".into(),
            device: "cpu".into(),
            numerics: "f32".into(),
            weight_bytes: 1,
            bandwidth: 1.0,
            memory: None,
            rows: vec![row("prefill", 99, None), row("decode", 64, Some(200.0)), row("decode", 8, None)],
        };
        let svg = plot(&found);
        // From 8 to 64 positions along the axis; the fastest, llama.cpp's 200, is its top.
        assert!(svg.contains("points=\"56.0,160.0 584.0,160.0\""), "{svg}");
        assert!(svg.contains("points=\"584.0,56.0\"") && svg.contains("points=\"584.0,238.0\""), "{svg}");
        assert_eq!((svg.matches("<circle").count(), svg.contains("a&lt;b")), (6, true), "{svg}");
    }
}
