//! A hash of each row of logits, or of embeddings, to show that recording changes nothing.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use crate::api::RawSched;
use crate::describe::Reader;
use crate::plan::PassPlan;

/// A text file of lines `position token hash`.
pub struct Hashes {
    file: File,
}

impl Hashes {
    /// Starts a file, or starts it again.
    pub fn create(path: &Path) -> io::Result<Hashes> {
        Ok(Hashes { file: File::create(path)? })
    }

    /// Adds the rows of a pass.
    ///
    /// # Safety
    /// The pass of `plan` has just been computed by `sched`, of the reader's library.
    pub unsafe fn add(&mut self, reader: Reader<'_>, sched: RawSched, plan: &PassPlan) -> io::Result<()> {
        let Some((tensor, rows)) = &plan.logits else { return Ok(()) };
        // SAFETY: by the caller's promise.
        let bytes = unsafe {
            (reader.api.sched_synchronize)(sched);
            (reader.api.nbytes)(*tensor)
        };
        let width = bytes / rows.len().max(1);
        let mut row = vec![0u8; width];
        for (index, position) in rows.iter().enumerate() {
            // SAFETY: within the tensor.
            unsafe { (reader.api.tensor_get)(*tensor, row.as_mut_ptr().cast(), index * width, width) };
            let token = plan.positions.iter().position(|p| p == position).map_or(0, |at| plan.tokens[at]);
            writeln!(self.file, "{position} {token} {:016x}", hash(&row))?;
        }
        Ok(())
    }
}

/// 64 bits of a row: each word is mixed in as splitmix64 does it.
fn hash(bytes: &[u8]) -> u64 {
    let mut state = bytes.len() as u64;
    for word in bytes.chunks(8) {
        let mut buffer = [0u8; 8];
        buffer[..word.len()].copy_from_slice(word);
        state = (state ^ u64::from_le_bytes(buffer)).wrapping_add(0x9e37_79b9_7f4a_7c15);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^= state >> 31;
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_anywhere_changes_the_hash() {
        let row = vec![0u8; 4099];
        for at in [0, 7, 8, 4095, 4098] {
            let mut other = row.clone();
            other[at] ^= 1;
            assert_ne!(hash(&row), hash(&other), "byte {at}");
        }
        assert_ne!(hash(&row), hash(&row[1..]));
    }
}
