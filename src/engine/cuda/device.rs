//! One GPU: opening it without a panic, memory, streams, events, launches.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaGraph, CudaStream, DriverError, result, sys};

use super::calls::{Address, Call};
use super::maps;
use crate::error::{Error, Result};

/// What errors of this engine are about.
const SUBJECT: &str = "cuda";
/// The oldest driver that runs the shipped kernels: CUDA 12.0, driver 525.
const DRIVER_MIN: i32 = 12_000;
const CPU_HINT: &str = "--device cpu runs anywhere";

/// An open GPU with a stream for kernels and a stream for copies to the host.
pub struct Device {
    context: Arc<CudaContext>,
    /// Kernels.
    pub compute: Arc<CudaStream>,
    /// Copies to the host.
    pub copy: Arc<CudaStream>,
    /// E.g. `NVIDIA H200`.
    pub name: String,
    /// Compute capability: major, minor.
    pub capability: (i32, i32),
    /// Highest CUDA version of the driver, 1000·major + 10·minor.
    pub driver: i32,
    /// Most shared memory of a block, in bytes.
    pub shared_max: u32,
    /// Whether a kernel may begin before the one ahead has ended: the kernels wait for it themselves.
    pub overlaps: bool,
}

/// How many GPUs there are: 0 also where there is no driver, or one that is too old.
pub fn count() -> usize {
    driver().map_or(0, |_| result::device::get_count().unwrap_or(0) as usize)
}

/// The CUDA version of the driver, once it is initialised.
fn driver() -> Result<i32> {
    // SAFETY: looks for a library by name.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::new(SUBJECT, "no NVIDIA driver").expected("libcuda.so.1").hint(CPU_HINT));
    }
    result::init().map_err(|error| {
        Error::new(SUBJECT, "the NVIDIA driver does not start").found(words(error)).hint(CPU_HINT)
    })?;
    let mut version = 0;
    // SAFETY: writes one integer.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(failed("driver version"))?;
    if version < DRIVER_MIN {
        return Err(Error::new(SUBJECT, "the NVIDIA driver is too old")
            .expected("driver 525 or newer (CUDA 12.0)")
            .found(format!("CUDA {}.{}", version / 1000, version % 1000 / 10))
            .hint(CPU_HINT));
    }
    Ok(version)
}

/// Bytes a second that a GPU reads and writes when it copies so many bytes, at the fastest of several times.
pub fn bandwidth(ordinal: usize, bytes: usize, times: usize) -> Result<f64> {
    let device = Device::open(ordinal)?;
    device.bind()?;
    let buffers = [device.alloc("a copy", bytes)?, device.alloc("a copy", bytes)?];
    device.clear(&buffers[0])?;
    let mut fastest = f64::INFINITY;
    for _ in 0..times {
        // Ten copies, so that starting and waiting for them counts little.
        let copies = 10;
        device.synchronize()?;
        let start = std::time::Instant::now();
        for _ in 0..copies {
            device.copy_within(buffers[0].address, buffers[1].address, bytes)?;
        }
        device.synchronize()?;
        fastest = fastest.min(start.elapsed().as_secs_f64() / f64::from(copies));
    }
    Ok(2.0 * bytes as f64 / fastest)
}

/// Bytes of a GPU's memory that nobody has taken.
pub fn free_memory(ordinal: usize) -> Result<usize> {
    let device = Device::open(ordinal)?;
    device.bind()?;
    device.free_memory()
}

impl Device {
    /// Opens GPU `ordinal`, counted from 0.
    pub fn open(ordinal: usize) -> Result<Device> {
        let driver = driver()?;
        let count = result::device::get_count().map_err(failed("counting GPUs"))? as usize;
        if ordinal >= count {
            return Err(Error::new(SUBJECT, format!("no GPU number {ordinal}"))
                .expected(if count == 0 { "a GPU".into() } else { format!("0 to {}", count - 1) })
                .hint(CPU_HINT));
        }
        let context = CudaContext::new(ordinal).map_err(failed("opening the GPU"))?;
        // SAFETY: every buffer is synchronised by hand here; cudarc's events would break graph capture.
        unsafe { context.disable_event_tracking() };
        let (_, first) = result::stream::get_priority_range().map_err(failed("priorities"))?;
        Ok(Device {
            // Before kernels of any other stream.
            compute: context.new_stream_with_priority(first).map_err(failed("a stream"))?,
            copy: context.new_stream().map_err(failed("a stream"))?,
            name: context.name().map_err(failed("the GPU's name"))?,
            capability: context.compute_capability().map_err(failed("the GPU's capability"))?,
            driver,
            shared_max: context
                .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
                .map_err(failed("the GPU's shared memory"))? as u32,
            overlaps: false,
            context,
        })
    }

    /// The context, to load modules into.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Makes the GPU current on this thread.
    pub fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(failed("the GPU"))
    }

    /// Waits for all kernels.
    pub fn synchronize(&self) -> Result<()> {
        self.compute.synchronize().map_err(failed("a kernel"))
    }

    /// A stream whose kernels let those of the compute stream go first.
    pub fn low_stream(&self) -> Result<Arc<CudaStream>> {
        self.context.new_stream_with_priority(0).map_err(failed("a stream"))
    }

    /// Bytes of device memory that nobody has taken.
    pub fn free_memory(&self) -> Result<usize> {
        result::mem_get_info().map(|(free, _)| free).map_err(failed("the free memory"))
    }

    /// Device memory for `what`; an error says how much was needed and how much there was.
    pub fn alloc(&self, what: &str, bytes: usize) -> Result<Buffer> {
        // SAFETY: plain allocation; a buffer is written before it is read.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|error| {
            if error.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                return failed(what)(error);
            }
            let (free, total) = result::mem_get_info().unwrap_or((0, 0));
            Error::new(SUBJECT, format!("out of memory for {what}"))
                .expected(format!("{} free", mib(bytes)))
                .found(format!("{} free of {} on {}", mib(free), mib(total), self.name))
                .hint(format!("fewer tokens or checkpoints (--layer, --checkpoint) need less; {CPU_HINT}"))
        })?;
        Ok(Buffer { address, bytes, context: self.context.clone() })
    }

    /// Memory of the host that copies run into at full speed.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned> {
        // SAFETY: plain allocation, zeroed before it can be read. Flags 0: cached, unlike cudarc's own.
        let data = unsafe {
            let data = result::malloc_host(bytes.max(1), 0).map_err(failed("pinned host memory"))?;
            std::ptr::write_bytes(data.cast::<u8>(), 0, bytes);
            data.cast()
        };
        Ok(Pinned { data, bytes, context: self.context.clone() })
    }

    /// Copies to the device, in the order of the compute stream. `from` may be reused at once.
    pub fn upload<T: Copy>(&self, from: &[T], to: Address) -> Result<()> {
        // SAFETY: pageable memory is taken over before the call returns; callers give room for it.
        unsafe { result::memcpy_htod_async(to, from, self.compute.cu_stream()) }.map_err(failed("an upload"))
    }

    /// Fills a buffer with zeros, in the order of the compute stream.
    pub fn clear(&self, buffer: &Buffer) -> Result<()> {
        // SAFETY: the buffer has that many bytes.
        unsafe { result::memset_d8_async(buffer.address, 0, buffer.bytes, self.compute.cu_stream()) }
            .map_err(failed("clearing memory"))
    }

    /// Copies to the host, after all kernels so far.
    pub fn download<T: Copy + Default>(&self, from: Address, n: usize) -> Result<Vec<T>> {
        self.synchronize()?;
        let mut out = vec![T::default(); n];
        // SAFETY: callers give an address with n values behind it.
        unsafe { result::memcpy_dtoh_sync(&mut out, from) }.map_err(failed("a download"))?;
        Ok(out)
    }

    /// Copies within the device, in the order of the compute stream.
    pub fn copy_within(&self, from: Address, to: Address, bytes: usize) -> Result<()> {
        // SAFETY: callers give two addresses with that much behind them.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.compute.cu_stream()) }
            .map_err(failed("a copy"))
    }

    /// Starts a copy to pinned memory on one of the streams.
    pub fn start_download(&self, from: Address, to: &mut [u8], stream: &CudaStream) -> Result<()> {
        // SAFETY: the caller waits for an event behind it before it reads `to`, which is pinned.
        unsafe { result::memcpy_dtoh_async(to, from, stream.cu_stream()) }.map_err(failed("a download"))
    }

    /// Begins to record what this thread enqueues on the compute stream, and on streams that are told to wait for it, instead
    /// of doing it.
    pub fn begin_capture(&self) -> Result<()> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.compute.begin_capture(mode).map_err(failed("graph capture"))
    }

    /// Ends it: all that was enqueued, as one launch. The compute stream must have been told to wait for the others.
    pub fn end_capture(&self) -> Result<CudaGraph> {
        let graph = self.compute.end_capture(sys::CUgraphInstantiate_flags(0));
        graph.map_err(failed("graph capture"))?.ok_or_else(|| error("nothing was captured"))
    }

    /// Dynamic shared memory of a call's blocks: what it asks for, or what there is.
    pub fn shared_bytes(&self, call: &Call) -> u32 {
        call.shared.min(self.shared_max)
    }

    /// Enqueues a kernel that computes.
    pub fn launch(&self, function: &CudaFunction, call: &Call) -> Result<()> {
        if self.overlaps {
            self.launch_early(function, call)
        } else {
            self.launch_on(function, call, &self.compute)
        }
    }

    /// Enqueues a kernel on one of the streams.
    pub fn launch_on(&self, function: &CudaFunction, call: &Call, stream: &CudaStream) -> Result<()> {
        let [x, y, z] = call.grid;
        let args = maps::encoded(call)?;
        let mut params = [args.start() as *mut c_void];
        // SAFETY: name and argument struct belong together (see calls.rs); addresses are of live buffers.
        unsafe {
            result::launch_kernel(
                function.cu_function(),
                (x, y, z),
                (call.threads, 1, 1),
                self.shared_bytes(call),
                stream.cu_stream(),
                &mut params,
            )
        }
        .map_err(failed(&call.kernel))
    }
}

impl Device {
    /// Enqueues a kernel that may begin before the one ahead of it has ended (programmatic dependent launch).
    fn launch_early(&self, function: &CudaFunction, call: &Call) -> Result<()> {
        let args = maps::encoded(call)?;
        let mut params = [args.start() as *mut c_void];
        let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
        let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        let mut attribute = sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let config = sys::CUlaunchConfig {
            gridDimX: call.grid[0],
            gridDimY: call.grid[1],
            gridDimZ: call.grid[2],
            blockDimX: call.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes(call),
            hStream: self.compute.cu_stream(),
            attrs: &mut attribute,
            numAttrs: 1,
        };
        let nothing = std::ptr::null_mut();
        // SAFETY: name and argument struct belong together (see calls.rs); addresses are of live buffers.
        unsafe { sys::cuLaunchKernelEx(&config, function.cu_function(), params.as_mut_ptr(), nothing) }
            .result()
            .map_err(failed(&call.kernel))
    }
}

/// Device memory, freed when dropped.
pub struct Buffer {
    /// First byte.
    pub address: Address,
    /// Length.
    pub bytes: usize,
    context: Arc<CudaContext>,
}

/// Where memory begins; 0 where there is none.
pub fn address_of(buffer: &Option<Buffer>) -> Address {
    buffer.as_ref().map_or(0, |buffer| buffer.address)
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // A failure to free can neither be reported nor mended here.
        let _ = self.context.bind_to_thread();
        // SAFETY: allocated by `Device::alloc`, freed once.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Pinned memory of the host.
pub struct Pinned {
    data: *mut u8,
    bytes: usize,
    context: Arc<CudaContext>,
}

// SAFETY: memory that this alone points to, at an address that is the same on every thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Length.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with that length and zeroed.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }

    /// The `index`-th word of four bytes as it is now, before anything that is read later.
    pub fn word(&self, index: usize) -> u32 {
        let bytes: *const [u8; 4] = self.bytes()[4 * index..][..4].as_ptr().cast();
        // SAFETY: four bytes that the slice has.
        let word = u32::from_le_bytes(unsafe { bytes.read_volatile() });
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        word
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated with that length and zeroed.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // As for a buffer; another GPU may be the one that is current.
        let _ = self.context.bind_to_thread();
        // SAFETY: allocated by `Device::pinned`, freed once.
        let _ = unsafe { result::free_host(self.data.cast()) };
    }
}

/// Turns an error of the driver into ours.
pub fn failed(what: &str) -> impl FnOnce(DriverError) -> Error {
    let what = what.to_owned();
    move |error| Error::new(SUBJECT, format!("{what} failed")).found(words(error))
}

/// An error about the GPU.
pub fn error(message: impl std::fmt::Display) -> Error {
    Error::new(SUBJECT, message)
}

fn words(error: DriverError) -> String {
    error
        .error_string()
        .ok()
        .map_or_else(|| format!("{:?}", error.0), |text| format!("{:?}: {}", error.0, text.to_string_lossy()))
}

fn mib(bytes: usize) -> String {
    format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20))
}
