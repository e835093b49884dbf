//! Tensor maps: what the copy engine is told of matrices, as the driver encodes it.

use std::borrow::Cow;
use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::driver::sys;

use super::calls::{Args, Call, TensorMap};
use super::device::failed;
use crate::error::Result;

/// Columns that are brought at a time: TILE_COLUMNS of kernels/warpgroup.cuh.
const COLUMNS: u32 = 64;

const _: () = assert!(size_of::<TensorMap>() == size_of::<sys::CUtensorMap>());

/// The arguments of a call with its tensor maps encoded.
///
/// # Errors
/// The driver does not take one of them.
pub fn encoded(call: &Call) -> Result<Cow<'_, Args>> {
    let args = call.args().0;
    if call.maps == 0 {
        return Ok(Cow::Borrowed(args));
    }
    let mut args = *args;
    let maps = args.start_mut().cast::<TensorMap>();
    for i in 0..call.maps {
        // SAFETY: arguments begin with so many maps; either form has the same size, and no alignment is asked for.
        unsafe {
            let map = maps.add(i).read_unaligned();
            if map.matrix != 0 {
                maps.add(i).cast::<sys::CUtensorMap>().write_unaligned(encode(&map)?);
            }
        }
    }
    Ok(Cow::Owned(args))
}

/// One map: of halves, rows of 128 bytes whose units of 16 are exchanged, zeros beyond the matrix.
fn encode(map: &TensorMap) -> Result<sys::CUtensorMap> {
    let mut encoded = MaybeUninit::<sys::CUtensorMap>::uninit();
    let columns = u64::from(map.columns);
    // SAFETY: the driver reads arrays of one or two elements, and writes the map if it succeeds.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            encoded.as_mut_ptr(),
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            2,
            map.matrix as *mut c_void,
            [columns, u64::from(map.rows)].as_ptr(),
            [2 * columns].as_ptr(),
            [COLUMNS, map.box_rows].as_ptr(),
            [1, 1].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        .result()
        .map_err(failed("a tensor map"))?;
        Ok(encoded.assume_init())
    }
}
