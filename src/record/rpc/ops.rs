//! ggml's ops by the numbers that cross the wire: they move whenever one is added before the last.

use std::ffi::{CStr, CString};
use std::sync::LazyLock;

/// `enum ggml_op` in its order; behind a colon, how many ops there were when one came that was not always there.
const OPS: &str = "\
    NONE DUP ADD ADD_ID ADD1 ACC SUB MUL DIV SQR SQRT LOG SIN COS SUM SUM_ROWS CUMSUM MEAN ARGMAX COUNT_EQUAL \
    REPEAT REPEAT_BACK CONCAT SILU_BACK NORM RMS_NORM RMS_NORM_BACK GROUP_NORM L2_NORM MUL_MAT MUL_MAT_ID \
    OUT_PROD SCALE SET CPY CONT RESHAPE VIEW PERMUTE TRANSPOSE GET_ROWS GET_ROWS_BACK SET_ROWS DIAG \
    DIAG_MASK_INF DIAG_MASK_ZERO SOFT_MAX SOFT_MAX_BACK ROPE ROPE_BACK CLAMP CONV_TRANSPOSE_1D IM2COL \
    IM2COL_BACK IM2COL_3D COL2IM_1D:97 CONV_2D CONV_3D CONV_2D_DW CONV_TRANSPOSE_2D POOL_1D POOL_2D \
    POOL_2D_BACK UPSCALE PAD PAD_REFLECT_1D ROLL ARANGE TIMESTEP_EMBEDDING ARGSORT TOP_K LEAKY_RELU TRI FILL \
    FLASH_ATTN_EXT FLASH_ATTN_BACK SSM_CONV SSM_SCAN WIN_PART WIN_UNPART GET_REL_POS ADD_REL_POS RWKV_WKV6 \
    GATED_LINEAR_ATTN RWKV_WKV7 SOLVE_TRI GATED_DELTA_NET LIGHTNING_INDEXER:98 DSV4_HC_COMB:101 DSV4_HC_PRE:101 \
    DSV4_HC_POST:101 UNARY MAP_CUSTOM1 MAP_CUSTOM2 MAP_CUSTOM3 CUSTOM CROSS_ENTROPY_LOSS \
    CROSS_ENTROPY_LOSS_BACK OPT_STEP_ADAMW OPT_STEP_SGD GLU";
/// `enum ggml_unary_op`, which grows at its end.
const UNARY: &str = "\
    ABS SGN NEG STEP TANH ELU RELU SIGMOID GELU GELU_QUICK SILU HARDSWISH HARDSIGMOID EXP EXPM1 SOFTPLUS \
    GELU_ERF XIELU FLOOR CEIL ROUND TRUNC";
/// `enum ggml_glu_op`, which grows at its end.
const GLU: &str = "REGLU GEGLU SWIGLU SWIGLU_OAI GEGLU_ERF GEGLU_QUICK SWIGLU_CLAMP";

/// Names with how many ops there were when each came.
static NAMES: LazyLock<[Vec<(CString, usize)>; 3]> = LazyLock::new(|| [OPS, UNARY, GLU].map(names));

fn names(table: &str) -> Vec<(CString, usize)> {
    let one = |entry: &str| {
        let (name, since) = entry.split_once(':').unwrap_or((entry, "0"));
        (CString::new(name).unwrap_or_default(), since.parse().unwrap_or(0))
    };
    table.split_whitespace().map(one).collect()
}

/// What ggml calls the tensor's op among `ops` of them, by its number and parameters: unary and gated ops by their own
/// names; `None` of a number that it does not have.
pub fn description(number: u32, params: &[u32; 16], ops: usize) -> Option<&'static CStr> {
    let [all, unary, gated] = &*NAMES;
    let of =
        |table: &'static [(CString, usize)], word: u32| table.get(word as usize).map(|(name, _)| &**name);
    let mut there = all.iter().filter(|(_, since)| *since <= ops).map(|(name, _)| &**name);
    match there.nth(number as usize)? {
        name if name == c"UNARY" => of(unary, params[0]),
        name if name == c"GLU" => of(gated, params[0]),
        name => Some(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_count_of_ops_has_its_own_numbers() {
        for ops in [96, 97, 98, 101] {
            assert_eq!(NAMES[0].iter().filter(|(_, since)| *since <= ops).count(), ops);
            let last = ops as u32 - 1;
            assert_eq!(description(last, &[2; 16], ops), Some(c"SWIGLU"), "{ops}");
            assert_eq!(description(last + 1, &[0; 16], ops), None);
        }
        let name = |number, word, ops| description(number, &[word; 16], ops);
        assert_eq!(name(29, 0, 96), Some(c"MUL_MAT"));
        assert_eq!((name(55, 0, 96), name(55, 0, 97)), (Some(c"CONV_2D"), Some(c"COL2IM_1D")));
        assert_eq!((name(86, 10, 96), name(86, 99, 96)), (Some(c"SILU"), None));
    }
}
