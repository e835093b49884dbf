#[path = "../cli/record.rs"]
mod record_cli;
#[derive(clap::Parser)]
struct Cli { #[command(flatten)] record: record_cli::Record }
fn main() {
    let cli = <Cli as clap::Parser>::parse();
    match cli.record.run(&mut std::io::stdout()) {
        Ok(true) => {}
        Ok(false) => std::process::exit(1),
        Err(error) => { eprintln!("error: {error}"); std::process::exit(2); }
    }
}
