//! Records what a ggml-rpc-server computes for a client, both unmodified, from between them.

mod capture;
mod connection;
mod library;
mod model;
mod ops;
pub mod own;
mod peer;
mod proxy;
pub mod wire;

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use parity_record::recorder::{Host, Recorder};

use super::finish::{Finished, complete};
use super::{Options, Summary, redirect};
use crate::error::{Error, Result};
use crate::memory;
use capture::{Capture, Recording};
use model::Model;
use peer::Peer;
use proxy::Session;

/// Where a program's command line takes the proxy's address, if not at its end behind `--rpc`.
pub const PLACE: &str = "{rpc}";
/// Part of the memory that is there which kept nodes may take, as for the tap: the server may be on this machine.
const SHARE_KEPT: u64 = 3;
/// How long connections may outlive the program that made them.
const LINGERING: Duration = Duration::from_secs(2);
/// How long is waited between looks at them.
const PAUSE: Duration = Duration::from_millis(5);

/// Where the proxy stands.
#[derive(Clone, Debug, Default)]
pub struct Between {
    /// `HOST:PORT` of the server.
    pub server: String,
    /// `HOST:PORT` that the client is to speak with; port 0 is any free one.
    pub listen: String,
    /// The model file of the client, where its command line does not tell it.
    pub model: Option<PathBuf>,
}

/// What happened to the recording, told by the recorder and by connections.
#[derive(Default)]
struct Told {
    recording: bool,
    sequences: usize,
    injected: Option<String>,
    stopped: Option<String>,
    /// A connection that broke.
    broken: Option<Error>,
    /// Connections so far, and those that are open.
    number: usize,
    open: usize,
    /// Whether the connection of the recording has ended.
    over: bool,
    /// Both ends of each, by its number.
    streams: HashMap<usize, [TcpStream; 2]>,
}

/// The recorder is in this process.
struct Here(Arc<Mutex<Told>>);

impl Host for Here {
    fn say(&self, message: &str) {
        eprintln!("parity: {}", crate::text::printable(message));
    }

    fn status(&self, key: &str, value: &str) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match key {
            "recording" => told.recording = true,
            "sequences" => told.sequences = value.parse().unwrap_or(told.sequences),
            "injected" => told.injected = Some(value.to_owned()),
            "stopped" => told.stopped = Some(value.to_owned()),
            _ => {}
        }
    }

    fn claim(&self) -> bool {
        true
    }

    fn broken(&self) -> Option<String> {
        connection::failure().as_ref().map(in_a_line)
    }
}

/// Runs a client with a proxy between it and a server, and records what the server computes.
///
/// # Errors
/// Where nothing can be recorded, or a peer breaks off before anything was.
pub fn record(options: &Options, between: &Between) -> Result<Summary> {
    let name = options.command.first().ok_or_else(|| {
        Error::new("parity record --rpc", "no client given")
            .hint("parity record --rpc --server HOST:PORT -o DIR -- llama-completion -m MODEL -p PROMPT -n 8 -ngl 99")
    })?;
    let path = between.model.clone().or_else(|| model_of(&options.command));
    let proxy = Proxy::new(options, between, path.as_deref())?;
    let mut client = Command::new(name);
    let with_place = |word: &OsString| match word.to_str() {
        Some(text) if text.contains(PLACE) => OsString::from(text.replace(PLACE, &proxy.address)),
        _ => word.clone(),
    };
    client.args(options.command[1..].iter().map(with_place));
    if !options.command.iter().any(|word| word.to_string_lossy().contains(PLACE)) {
        client.args(["--rpc", &proxy.address]);
    }
    client.envs(options.environment.iter().map(|(key, value)| (key, value)));
    redirect(&mut client, &options.output)?;
    let status = proxy.serve(|_| {
        client.status().map(Some).map_err(|e| Error::file(Path::new(name), format!("cannot be run: {e}")))
    })?;
    proxy.finish(options, status)
}

/// Stands between clients that come by themselves and a server, until the one whose passes are recorded has gone.
///
/// # Errors
/// As for [`record`].
pub fn wait(options: &Options, between: &Between) -> Result<Summary> {
    let model = between.model.as_deref();
    let proxy = Proxy::new(options, between, model)?;
    eprintln!("parity: the client's --rpc is {}; recording ends when it goes", proxy.address);
    proxy.serve(|told| {
        while !told.lock().unwrap_or_else(PoisonError::into_inner).over {
            std::thread::sleep(PAUSE);
        }
        Ok(())
    })?;
    proxy.finish(options, None)
}

/// Listens, and records.
struct Proxy {
    listener: TcpListener,
    /// What the client is told.
    address: String,
    server: String,
    model: PathBuf,
    recording: Mutex<Recording>,
    told: Arc<Mutex<Told>>,
}

impl Proxy {
    fn new(options: &Options, between: &Between, model: Option<&Path>) -> Result<Proxy> {
        let Some(model) = model else {
            return Err(Error::new(
                "parity record --rpc",
                "the client's tokens are known from rows of its model's embedding alone",
            )
            .expected("the client's GGUF file: on its command line, or -m FILE")
            .found("none"));
        };
        let model = Model::open(model)?;
        // A server that is not there is told before a client is run.
        drop(reach(&between.server)?);
        let listener = TcpListener::bind(&between.listen);
        let listener =
            listener.map_err(|e| Error::new(&between.listen, format!("cannot be listened at: {e}")))?;
        let address = listener.local_addr().map_err(|e| Error::new(&between.listen, e))?.to_string();
        let told = Arc::new(Mutex::new(Told::default()));
        let memory = memory::available()?.map(|(_, bytes)| bytes / SHARE_KEPT);
        if let Some(graphs) = &options.graphs {
            // Passes are appended, of this recording alone.
            let _ = std::fs::remove_file(graphs);
        }
        let asked = parity_record::recorder::Options {
            dir: Some(options.dir.clone()),
            filter: options.filter.clone(),
            sequence: options.sequence,
            observe: options.observe,
            memory,
            hashed: options.hashed,
            graphs: options.graphs.clone(),
            inject: options.inject.clone(),
            ..parity_record::recorder::Options::default()
        };
        let recorder = Recorder::new(asked, Arc::new(Here(Arc::clone(&told))));
        let path = model.path.clone();
        let recording = Mutex::new(Recording { recorder, model, version: None, begun: false });
        Ok(Proxy { listener, address, server: between.server.clone(), model: path, recording, told })
    }

    /// Serves clients while `work` is done.
    fn serve<R>(&self, work: impl FnOnce(&Mutex<Told>) -> Result<R>) -> Result<R> {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while let Ok((client, _)) = self.listener.accept() {
                    if done.load(Ordering::Acquire) {
                        break;
                    }
                    let mut told = self.lock();
                    (told.open, told.number) = (told.open + 1, told.number + 1);
                    let number = told.number;
                    drop(told);
                    scope.spawn(move || self.connection(client, number));
                }
            });
            let result = work(&self.told);
            let since = Instant::now();
            while self.lock().open > 0 && since.elapsed() < LINGERING {
                std::thread::sleep(PAUSE);
            }
            done.store(true, Ordering::Release);
            // Wakes who accepts.
            let _ = self.listener.local_addr().and_then(|mut address| {
                if address.ip().is_unspecified() {
                    address.set_ip(Ipv4Addr::LOCALHOST.into());
                }
                TcpStream::connect(address)
            });
            self.lock().streams.values().flatten().for_each(close);
            result
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One client's connection, to its end.
    fn connection(&self, client: TcpStream, number: usize) {
        let mut capture = Capture::new(&self.recording);
        let ended = self.pass_on(client, number, &mut capture);
        let is_recorded = capture.is_recorded();
        drop(capture);
        let mut recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = ended {
            recording.recorder.stop(&in_a_line(&error));
            self.lock().broken.get_or_insert(error);
        }
        recording.recorder.settle();
        drop(recording);
        let mut told = self.lock();
        told.streams.remove(&number).iter().flatten().for_each(close);
        told.open -= 1;
        told.over |= is_recorded || told.broken.is_some() || told.stopped.is_some();
    }

    fn pass_on(&self, client: TcpStream, number: usize, capture: &mut Capture<'_>) -> Result<()> {
        let server = reach(&self.server)?;
        if let (Ok(client), Ok(server)) = (client.try_clone(), server.try_clone()) {
            self.lock().streams.insert(number, [client, server]);
        }
        let (client, server) = (Peer::new("the client", client)?, Peer::new("the server", server)?);
        match Session::open(client, server, capture)? {
            Some(mut session) => session.run(),
            None => Ok(()),
        }
    }

    /// Completes the manifest, and says what was recorded.
    fn finish(self, options: &Options, status: Option<ExitStatus>) -> Result<Summary> {
        let Recording { recorder, model, version, .. } =
            self.recording.into_inner().unwrap_or_else(PoisonError::into_inner);
        drop(recorder);
        let told = std::mem::take(&mut *self.told.lock().unwrap_or_else(PoisonError::into_inner));
        if !told.recording {
            return Err(told.broken.unwrap_or_else(|| nothing(told.stopped, status)));
        }
        if let Some(inject) = options.inject.as_ref().filter(|_| told.injected.is_none()) {
            return Err(super::finish::no_place(inject));
        }
        let broken = told.broken.as_ref().map(in_a_line);
        let mut provenance = vec![
            ("rpc".to_owned(), version.map_or_else(String::new, |version| format!("protocol {version}"))),
            ("given".to_owned(), "embed: computed by the client".to_owned()),
            ("weights".to_owned(), model.compared()),
        ];
        provenance.extend(super::finish::injected(options.inject.as_ref(), told.injected.as_ref()));
        if let Some(status) = status {
            provenance.extend(super::finish::provenance(options, status));
        }
        let by_signal = status.filter(|status| status.code().is_none()).map(super::finish::ended);
        let summary = complete(Finished {
            dir: &options.dir,
            filter: &options.filter,
            model: Some(&self.model),
            prompt: super::finish::prompt(&options.command).filter(|_| !options.no_text),
            provenance,
            incomplete: broken.or(told.stopped).or(by_signal),
            sequences: told.sequences,
            program: status,
        })?;
        Ok(Summary { model: Some(self.model), ..summary })
    }
}

/// Who broke off, and how.
fn in_a_line(error: &Error) -> String {
    format!("{}: {}", error.subject(), error.cause())
}

/// Ends a connection for everybody who holds it.
fn close(stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Both);
}

/// A connection to a server.
fn reach(address: &str) -> Result<TcpStream> {
    TcpStream::connect(address).map_err(|e| {
        Error::new(address, format!("no ggml-rpc-server answers: {e}"))
            .hint("start one there: ggml-rpc-server --host 127.0.0.1 --port 50052")
    })
}

/// Why there is no dump.
fn nothing(stopped: Option<String>, status: Option<ExitStatus>) -> Error {
    let error = Error::new("parity record --rpc", "no forward pass of the client's reached the server");
    let found = stopped.or_else(|| status.map(|status| format!("it ended with {}", super::ending(status))));
    error.found(found.unwrap_or_else(|| "none".to_owned())).hint(
        "-ngl 99 leaves all layers to the server; --device RPC0 where there are other devices; -m FILE where the model is not the \
         first on the command line",
    )
}

/// The first model file that a command line names.
fn model_of(command: &[OsString]) -> Option<PathBuf> {
    let is_model = |path: &PathBuf| {
        let mut magic = [0; 4];
        File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == b"GGUF"
    };
    command.iter().skip(1).map(PathBuf::from).find(is_model)
}
