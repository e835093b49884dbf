//! A llama.cpp context for one prompt: the one place that sets its parameters.

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr;
use std::sync::{Mutex, Once};

use llama_cpp_sys_2 as llama;

use super::{BuiltinOptions, CacheType};
use crate::error::{Error, Result};

/// A model and, once it is open, its context.
pub struct Context {
    path: PathBuf,
    model: *mut llama::llama_model,
    context: *mut llama::llama_context,
}

/// llama.cpp's last complaint, for the error that follows it.
static COMPLAINT: Mutex<String> = Mutex::new(String::new());

unsafe extern "C" fn log(level: llama::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if level != llama::GGML_LOG_LEVEL_ERROR || text.is_null() {
        return;
    }
    // SAFETY: not null, and a C string of llama.cpp's.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    if let Ok(mut complaint) = COMPLAINT.lock() {
        // The first complaint is the cause; what follows is what became of it.
        if complaint.is_empty() {
            *complaint = text.trim().to_owned();
        }
    }
}

fn complaint() -> String {
    let text = COMPLAINT.lock().map(|mut text| std::mem::take(&mut *text)).unwrap_or_default();
    if text.is_empty() { "no reason given".to_owned() } else { text }
}

/// The version that is built in.
pub fn version() -> String {
    // SAFETY: string constants of the library.
    let [llama, ggml] = unsafe { [llama::llama_version(), llama::ggml_version()] }.map(|text| {
        // SAFETY: as above.
        if text.is_null() {
            String::new()
        } else {
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        }
    });
    format!("{llama}, ggml {ggml}")
}

impl Context {
    /// Loads the model.
    pub fn new(options: &BuiltinOptions) -> Result<Context> {
        static INIT: Once = Once::new();
        // SAFETY: once, before anything else; the callbacks are functions that live as long as the program.
        INIT.call_once(|| unsafe {
            llama::llama_log_set(Some(log), ptr::null_mut());
            llama::llama_backend_init();
        });
        let _ = complaint();
        let path = CString::new(options.model.as_os_str().as_bytes())
            .map_err(|_| Error::file(&options.model, "is no file name"))?;
        if !options.model.is_file() {
            return Err(Error::file(&options.model, "no such model"));
        }
        // SAFETY: a C string and the library's own defaults, changed field by field.
        let model = unsafe {
            let mut params = llama::llama_model_default_params();
            params.n_gpu_layers = i32::try_from(options.gpu_layers).unwrap_or(i32::MAX);
            params.use_extra_bufts = options.repack;
            llama::llama_model_load_from_file(path.as_ptr(), params)
        };
        if model.is_null() {
            return Err(Error::file(&options.model, "llama.cpp rejects this model").found(complaint()));
        }
        Ok(Context { path: options.model.clone(), model, context: ptr::null_mut() })
    }

    /// Makes the context: the prompt of `prefill` tokens in one pass, `total` tokens in all.
    pub fn open(&mut self, options: &BuiltinOptions, prefill: usize, total: usize) -> Result<()> {
        let size = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let cache = match options.cache_type {
            CacheType::F32 => llama::GGML_TYPE_F32,
            CacheType::F16 => llama::GGML_TYPE_F16,
            CacheType::Bf16 => llama::GGML_TYPE_BF16,
        };
        // SAFETY: the model is loaded; the parameters are the library's own defaults, changed field by field.
        self.context = unsafe {
            let mut params = llama::llama_context_default_params();
            params.n_ctx = size(total + 1);
            params.n_batch = size(prefill.max(1));
            params.n_ubatch = params.n_batch;
            params.n_outputs_max = params.n_batch;
            params.n_outputs_max_per_seq = params.n_batch;
            params.n_threads = i32::try_from(options.threads.max(1)).unwrap_or(1);
            params.n_threads_batch = params.n_threads;
            params.flash_attn_type = if options.flash {
                llama::LLAMA_FLASH_ATTN_TYPE_ENABLED
            } else {
                llama::LLAMA_FLASH_ATTN_TYPE_DISABLED
            };
            (params.type_k, params.type_v) = (cache, cache);
            params.offload_kqv = options.gpu_layers > 0;
            params.op_offload = options.gpu_layers > 0;
            llama::llama_init_from_model(self.model, params)
        };
        if self.context.is_null() {
            return Err(Error::file(&self.path, "llama.cpp makes no context for it").found(complaint()));
        }
        Ok(())
    }

    fn vocabulary(&self) -> *const llama::llama_vocab {
        // SAFETY: the model is loaded.
        unsafe { llama::llama_model_get_vocab(self.model) }
    }

    /// Tokens of a text, with what the model wants before and behind it.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        let length = i32::try_from(text.len()).map_err(|_| Error::new("prompt", "is too long"))?;
        let mut room = length.saturating_add(8);
        loop {
            let mut tokens: Vec<i32> = vec![0; usize::try_from(room).unwrap_or(0)];
            // SAFETY: pointers with their lengths.
            let n = unsafe {
                let start = text.as_ptr().cast();
                llama::llama_tokenize(self.vocabulary(), start, length, tokens.as_mut_ptr(), room, true, true)
            };
            match usize::try_from(n) {
                Ok(n) => {
                    return Ok(tokens[..n.min(tokens.len())].iter().map(|&token| token as u32).collect());
                }
                // A negative number says how much room there must be.
                Err(_) if n > i32::MIN && -n > room => room = -n,
                Err(_) => return Err(Error::new("prompt", "llama.cpp cannot tokenize it")),
            }
        }
    }

    /// Whether all tokens are in the vocabulary.
    pub fn check(&self, tokens: &[u32]) -> Result<()> {
        // SAFETY: the model is loaded.
        let n = u32::try_from(unsafe { llama::llama_vocab_n_tokens(self.vocabulary()) }).unwrap_or(0);
        match tokens.iter().find(|&&token| token >= n) {
            Some(token) => Err(Error::new("--tokens", "is no token of this model")
                .expected(format!("ids below {n}"))
                .found(token)),
            None => Ok(()),
        }
    }

    /// Evaluates tokens from position `first` on, with logits of each; the most likely token behind them.
    pub fn decode(&mut self, tokens: &[u32], first: usize) -> Result<u32> {
        let n = i32::try_from(tokens.len()).map_err(|_| Error::new("prompt", "is too long"))?;
        let mut ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        let mut positions: Vec<i32> = (first as i32..).take(tokens.len()).collect();
        let (mut counts, mut sequence) = (vec![1i32; tokens.len()], 0i32);
        let mut sequences = vec![&raw mut sequence; tokens.len()];
        let mut logits = vec![1i8; tokens.len()];
        let batch = llama::llama_batch {
            n_tokens: n,
            token: ids.as_mut_ptr(),
            embd: ptr::null_mut(),
            pos: positions.as_mut_ptr(),
            n_seq_id: counts.as_mut_ptr(),
            seq_id: sequences.as_mut_ptr(),
            logits: logits.as_mut_ptr(),
        };
        // SAFETY: the context is open, and the batch's arrays outlive the call.
        let status = unsafe { llama::llama_decode(self.context, batch) };
        if status != 0 {
            return Err(Error::file(&self.path, format!("llama.cpp fails to evaluate position {first}"))
                .found(complaint()));
        }
        // SAFETY: the row of the last token was computed, (V,).
        let row = unsafe {
            let width = usize::try_from(llama::llama_vocab_n_tokens(self.vocabulary())).unwrap_or(0);
            let row = llama::llama_get_logits_ith(self.context, -1);
            if row.is_null() { &[][..] } else { std::slice::from_raw_parts(row, width) }
        };
        most_likely(row).ok_or_else(|| Error::file(&self.path, "no token can be sampled").found("NaN only"))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by this object and used nowhere else; the context goes before its model.
        unsafe {
            if !self.context.is_null() {
                llama::llama_free(self.context);
            }
            llama::llama_model_free(self.model);
        }
    }
}

/// The first of the largest logits, as a greedy sampler takes it.
fn most_likely(row: &[f32]) -> Option<u32> {
    let best = |best: Option<(usize, f32)>, (token, &logit): (usize, &f32)| match best {
        Some((_, known)) if !(logit > known) => best,
        _ if logit.is_nan() => best,
        _ => Some((token, logit)),
    };
    row.iter().enumerate().fold(None, best).and_then(|(token, _)| u32::try_from(token).ok())
}
