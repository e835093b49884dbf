//! `parity record --rpc`, `parity rpc-proxy` and `parity rpc-server`: recordings from between a client and a ggml-rpc-server.

use std::path::PathBuf;

use super::output::print;
use super::{Outcome, exit_code, record, shared};
use crate::error::{Error, Result};
use crate::record::rpc::wire::Version;
use crate::record::rpc::{Between, own, wait};
use crate::record::{Observe, Options};
use crate::report::Verdict;

/// Any free port, for this machine alone.
const LOOPBACK: &str = "127.0.0.1:0";

/// Flags of `parity record` for RPC.
#[derive(clap::Args)]
pub struct Args {
    /// Record what a ggml-rpc-server computes for it
    ///
    /// Any system, any device of the server, programs that are linked statically too: nothing is loaded into anybody. The
    /// command gets --rpc HOST:PORT of a proxy behind its own arguments, or the address in the place of {rpc} where its
    /// arguments hold that. What it computes itself (with -ngl 99 the rows of the token embedding) is an input.
    #[arg(long, requires = "command", conflicts_with_all = ["verify", "import"])]
    rpc: bool,

    /// The ggml-rpc-server that computes [default: ours]
    #[arg(long, value_name = "HOST:PORT", requires = "rpc")]
    server: Option<String>,

    #[command(flatten)]
    own: OwnArgs,
}

/// How a server of ours computes.
#[derive(clap::Args)]
pub struct OwnArgs {
    /// Protocol of the client, where our server computes
    #[arg(long, value_name = "VERSION", default_value_t = Version::LAST)]
    protocol: Version,

    /// Have our server compute in f64
    #[arg(long = "f64")]
    double: bool,
}

impl Args {
    /// Whether the command is a client.
    pub fn is_asked(&self) -> bool {
        self.rpc
    }

    /// Where the proxy stands, if there is one.
    pub fn between(&self, model: Option<PathBuf>) -> Result<Option<Between>> {
        if !self.rpc {
            return Ok(None);
        }
        let server = match &self.server {
            Some(server) => address("--server", server)?,
            None => {
                let (listener, server) = own::listen(LOOPBACK)?;
                let (version, double) = (self.own.protocol, self.own.double);
                // It ends with the process.
                std::thread::spawn(move || own::serve(&listener, version, double));
                server
            }
        };
        Ok(Some(Between { server, listen: LOOPBACK.to_owned(), model }))
    }
}

/// A host and a port.
fn address(flag: &str, text: &str) -> Result<String> {
    let port =
        text.rsplit_once(':').and_then(|(host, port)| port.parse::<u16>().ok().filter(|_| !host.is_empty()));
    match port {
        Some(_) => Ok(text.to_owned()),
        None => {
            Err(Error::new(flag, "no address").expected("HOST:PORT, such as 127.0.0.1:50052").found(text))
        }
    }
}

/// Flags of `parity rpc-server`.
#[derive(clap::Args)]
pub struct ServerArgs {
    /// Where clients are waited for
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:50052")]
    listen: String,

    #[command(flatten)]
    own: OwnArgs,
}

/// Computes for clients until it is ended.
pub fn server(args: &ServerArgs) -> Outcome {
    let (listener, address) = own::listen(&address("--listen", &args.listen)?)?;
    let (version, double) = (args.own.protocol, args.own.double);
    let numbers = if double { "f64" } else { "f32" };
    eprintln!("parity: a ggml-rpc-server of protocol {version} that computes in {numbers}, at {address}");
    own::serve(&listener, version, double);
    Ok(exit_code(Verdict::Parity))
}

const EXAMPLES: &str = "\
Example:
  parity rpc-proxy --server 127.0.0.1:50052 --listen 127.0.0.1:50053 -m model.gguf -o ref
  llama-server -m model.gguf -ngl 99 --rpc 127.0.0.1:50053        (in another terminal)";

/// Flags of `parity rpc-proxy`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct ProxyArgs {
    /// The ggml-rpc-server that computes
    #[arg(long, value_name = "HOST:PORT")]
    server: String,

    /// Where clients are waited for
    ///
    /// This machine alone and a free port, which is said, unless told otherwise: ggml's RPC knows no passwords.
    #[arg(long, value_name = "HOST:PORT", default_value = LOOPBACK)]
    listen: String,

    /// The client's GGUF model: its embedding tells the tokens
    #[arg(short, long, value_name = "FILE")]
    model: PathBuf,

    #[command(flatten)]
    kept: record::Kept,

    /// Which of several prompts to record, from 0
    #[arg(long, value_name = "N")]
    sequence: Option<usize>,

    /// How closely to look: auto, none, outputs or nodes, as for parity record
    #[arg(long, value_name = "LEVEL", default_value_t)]
    observe: Observe,
}

/// Records until the client has gone, and says what was recorded.
pub fn proxy(args: &ProxyArgs) -> Outcome {
    let _room = shared::room_for_a_dump("-o", &args.kept.output, args.kept.force)?;
    let options = Options {
        dir: args.kept.output.clone(),
        filter: args.kept.filter(),
        sequence: args.sequence,
        observe: args.observe,
        ..Options::default()
    };
    let between = Between {
        server: address("--server", &args.server)?,
        listen: address("--listen", &args.listen)?,
        model: Some(args.model.clone()),
    };
    let summary = wait(&options, &between)?;
    print(&record::text(&summary))?;
    Ok(record::ending(&summary))
}
