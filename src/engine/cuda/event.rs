//! Points in streams.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result, sys};

use super::device::{Device, failed};
use crate::error::Result;

/// A point in a stream that another stream or the host can wait for.
pub struct Event {
    event: sys::CUevent,
    context: Arc<CudaContext>,
}

impl Event {
    /// A point that no stream has been told to get to.
    pub fn new(device: &Device) -> Result<Event> {
        let context = device.context().clone();
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        Ok(Event { event: event.map_err(failed("an event"))?, context })
    }

    /// Marks the point that `stream` has been told to get to.
    pub fn record(&self, stream: &CudaStream) -> Result<()> {
        // SAFETY: both are alive.
        unsafe { result::event::record(self.event, stream.cu_stream()) }.map_err(failed("an event"))
    }

    /// The same of a point that the host is going to wait for: where the stream is being captured, each launch of the graph
    /// marks it when it gets there, and until then it may be past from the launch before.
    pub fn record_for_host(&self, stream: &CudaStream) -> Result<()> {
        let status = stream.capture_status().map_err(failed("a stream"))?;
        let captured = status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
        let external = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL;
        let flags = if captured { external } else { sys::CUevent_record_flags::CU_EVENT_RECORD_DEFAULT };
        // SAFETY: both are alive.
        unsafe { sys::cuEventRecordWithFlags(self.event, stream.cu_stream(), flags as u32) }
            .result()
            .map_err(failed("an event"))
    }

    /// Lets `stream` wait for the point.
    pub fn hold(&self, stream: &CudaStream) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive.
        unsafe { result::stream::wait_event(stream.cu_stream(), self.event, flags) }
            .map_err(failed("an event"))
    }

    /// Whether the stream has got there.
    pub fn is_past(&self) -> Result<bool> {
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(failed("a kernel or a copy")(error)),
        }
    }

    /// Waits for the point on the host.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.event) }.map_err(failed("a kernel or a copy"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: created once, destroyed once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}
