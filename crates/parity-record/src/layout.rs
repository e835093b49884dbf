//! Where the fields of a `ggml_tensor` lie in the loaded library: measured on tensors with odd sizes,
//! since the struct changed over the years and no accessor exists for most of it.

use std::ffi::c_void;

use parity_graph::params::WORDS;

use crate::api::{Api, InitParams, RawTensor};

/// Byte offsets within a `ggml_tensor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    /// `enum ggml_type`, i32
    pub dtype: usize,
    /// extents, 4 × i64
    pub ne: usize,
    /// strides in bytes, 4 × usize
    pub nb: usize,
    /// `enum ggml_op`, i32: right before its parameters
    pub op: usize,
    /// 16 words, each an i32 or the bits of an f32
    pub op_params: usize,
    /// i32
    pub flags: usize,
    /// sources, 10 × pointer
    pub src: usize,
    /// pointer
    pub view_src: usize,
    /// usize
    pub view_offs: usize,
    /// pointer: right behind `view_offs`
    pub data: usize,
    /// 64 bytes
    pub name: usize,
    /// Bytes of a tensor, all of which say what it is; `None` where others lie between them.
    pub bytes: Option<usize>,
}

/// `GGML_TENSOR_FLAG_COMPUTE`
pub const FLAG_COMPUTE: i32 = 16;
/// Bytes of a `ggml_tensor` that may hold a field other than the name.
const SCANNED: usize = 336;
/// Bytes of a `ggml_tensor` in every release known.
pub const TENSOR_BYTES: usize = SCANNED;
/// Words that are compared: a tensor's fields are aligned to 4 bytes.
const WORD: usize = 4;

const GGML_TYPE_F32: i32 = 0;
const GGML_TYPE_F16: i32 = 1;
/// Extents that no field holds by accident.
const ODD: [i64; 4] = [3, 5, 7, 11];
/// Parameters that no field holds by accident: epsilons of two norms.
const ODD_EPS: [f32; 2] = [0.734_375, 0.421_875];
/// Offset of the view that is measured: odd elements in.
const ODD_OFFSET: usize = 52;

impl TensorLayout {
    /// Measures the layout.
    ///
    /// # Errors
    /// Names the field that is not where exactly one place for it would be.
    ///
    /// # Safety
    /// `api` holds the functions of one loaded ggml.
    pub unsafe fn measure(api: &Api) -> Result<TensorLayout, String> {
        let params = InitParams { mem_size: 1 << 16, mem_buffer: std::ptr::null_mut(), no_alloc: false };
        // SAFETY: an arena of its own, freed below.
        let arena = unsafe { (api.init)(params) };
        if arena.is_null() {
            return Err("ggml_init made no arena".to_owned());
        }
        // SAFETY: the arena is alive.
        let layout = unsafe { measure_in(api, arena) };
        // SAFETY: nothing of the arena is used any more.
        unsafe { (api.free)(arena) };
        layout
    }
}

/// The bytes of one tensor as they were at one time.
struct Image(Vec<u8>);

impl Image {
    unsafe fn of(tensor: RawTensor, bytes: usize) -> Image {
        // SAFETY: the arena holds at least `bytes` behind every tensor's start.
        Image(unsafe { std::slice::from_raw_parts(tensor.cast::<u8>(), bytes) }.to_vec())
    }

    fn i32(&self, at: usize) -> i32 {
        i32::from_ne_bytes(self.0[at..at + 4].try_into().expect("four bytes"))
    }

    fn i64(&self, at: usize) -> i64 {
        i64::from_ne_bytes(self.0[at..at + 8].try_into().expect("eight bytes"))
    }

    /// All places where these words stand one after another.
    fn places(&self, words: &[i64]) -> Vec<usize> {
        let last = self.0.len() - 8 * words.len();
        (0..=last)
            .step_by(8)
            .filter(|&at| words.iter().enumerate().all(|(i, &word)| self.i64(at + 8 * i) == word))
            .collect()
    }
}

fn only(field: &str, places: &[usize]) -> Result<usize, String> {
    match places {
        [place] => Ok(*place),
        _ => Err(format!("`ggml_tensor.{field}` could stand at {places:?}")),
    }
}

/// Where two norms have their epsilons and 60 zero bytes behind: the first word of their parameters.
fn places_of_eps(norms: &[Image; 2]) -> Vec<usize> {
    let bytes = WORD * WORDS;
    let starts = |image: &Image, at: usize, eps: f32| {
        image.i32(at) == eps.to_bits() as i32 && image.0[at + WORD..at + bytes].iter().all(|byte| *byte == 0)
    };
    let last = norms[0].0.len().saturating_sub(bytes);
    (0..=last)
        .step_by(WORD)
        .filter(|&at| norms.iter().zip(ODD_EPS).all(|(image, eps)| starts(image, at, eps)))
        .collect()
}

unsafe fn measure_in(api: &Api, arena: *mut c_void) -> Result<TensorLayout, String> {
    let tensor = |dtype: i32| {
        // SAFETY: the arena is alive and large enough.
        unsafe { (api.new_tensor_4d)(arena, dtype, ODD[0], ODD[1], ODD[2], ODD[3]) }
    };
    let (a, b, half) = (tensor(GGML_TYPE_F32), tensor(GGML_TYPE_F32), tensor(GGML_TYPE_F16));
    // SAFETY: tensors of this arena.
    let (sum, view) = unsafe { ((api.add)(arena, a, b), (api.view_1d)(arena, a, ODD[0], ODD_OFFSET)) };
    // SAFETY: as above.
    let norms = ODD_EPS.map(|eps| unsafe { (api.rms_norm)(arena, a, eps) });
    if [a, b, half, sum, view, norms[0], norms[1]].iter().any(|tensor| tensor.is_null()) {
        return Err("ggml made no tensors".to_owned());
    }
    // SAFETY: a tensor of this arena.
    let name = (unsafe { (api.get_name)(a) } as usize).wrapping_sub(a as usize);
    if !(name + 64 <= SCANNED) {
        return Err(format!("`ggml_tensor.name` stands at {name}"));
    }
    // Fields other than data and extra stand before the name.
    // SAFETY: every tensor of the arena is longer than its name's offset.
    let image = |tensor| unsafe { Image::of(tensor, name) };
    let (plain, halves, summed, viewed) = (image(a), image(half), image(sum), image(view));
    // SAFETY: a tensor of this arena.
    unsafe { (api.set_input)(b) };
    let flagged = image(b);
    let strides = [4, 4 * ODD[0], 4 * ODD[0] * ODD[1], 4 * ODD[0] * ODD[1] * ODD[2]];
    let words = (0..name).step_by(WORD);
    let dtype: Vec<usize> = words
        .clone()
        .filter(|&at| plain.i32(at) == GGML_TYPE_F32 && halves.i32(at) == GGML_TYPE_F16)
        .collect();
    let src = only("src", &summed.places(&[a as i64, b as i64]))?;
    // `b` is as `a` but for its data and the input flag.
    let flags: Vec<usize> = words.filter(|&at| plain.i32(at) == 0 && flagged.i32(at) == 1).collect();
    let op_params = only("op_params", &places_of_eps(&norms.map(image)))?;
    let view_src = only("view_src", &viewed.places(&[a as i64, ODD_OFFSET as i64]))?;
    let data = view_src + 16;
    // SAFETY: a tensor of this arena.
    if plain.i64(data) != unsafe { (api.get_data)(a) } as i64 {
        return Err("`ggml_tensor.data` does not follow `view_offs`".to_owned());
    }
    Ok(TensorLayout {
        op: op_params - WORD,
        data,
        op_params,
        dtype: only("type", &dtype)?,
        ne: only("ne", &plain.places(&ODD))?,
        nb: only("nb", &plain.places(&strides))?,
        flags: only("flags", &flags)?,
        src,
        view_src,
        view_offs: view_src + 8,
        bytes: Some(name + 64),
        name,
    })
}
