//! The connection to a server as functions of a ggml library find it: they are called with tensors alone.

use std::cell::{Cell, RefCell};
use std::ptr::null_mut;

use super::proxy::Server;
use crate::error::{Error, Result};

thread_local! {
    /// The server of this thread's connection, while a graph is recorded.
    static SERVER: Cell<*mut Server> = const { Cell::new(null_mut()) };
    /// What went wrong with it.
    static FAILURE: RefCell<Option<Error>> = const { RefCell::new(None) };
}

/// Lets the functions of a graph's library speak with a server while `work` is done.
pub fn with_server<R>(server: &mut Server, work: impl FnOnce() -> R) -> R {
    SERVER.set(server);
    FAILURE.take();
    let result = work();
    SERVER.set(null_mut());
    result
}

/// Speaks with the server of [`with_server`]; what goes wrong is kept.
///
/// # Errors
/// Of the connection, now or before.
pub fn speak<R>(work: impl FnOnce(&mut Server) -> Result<R>) -> Result<R> {
    if let Some(failure) = failure() {
        return Err(failure);
    }
    // Taken out meanwhile, so that nobody else has it.
    let server = SERVER.replace(null_mut());
    // SAFETY: set by `with_server`, which holds the only reference until it returns; null elsewhere.
    let Some(server_now) = (unsafe { server.as_mut() }) else {
        return Err(Error::new("ggml's RPC", "no connection to speak through"));
    };
    let result = work(server_now);
    SERVER.set(server);
    if let Err(error) = &result {
        FAILURE.set(Some(error.clone()));
    }
    result
}

/// What went wrong with the server since [`with_server`].
pub fn failure() -> Option<Error> {
    FAILURE.with_borrow(Clone::clone)
}
