//! The arithmetic that a recording is judged by: as its producer declares it, else as its data show it. The name of a
//! file or of a producer decides nothing.

use super::bounds::storage_unit;
use crate::checkpoint::Kind;
use crate::dump::Recording;
use crate::numerics::{Numerics, Products, Storage};

/// A producer's arithmetic and how it became known.
#[derive(Clone, Debug, PartialEq)]
pub struct Declared {
    /// The arithmetic.
    pub numerics: Numerics,
    /// A sentence where it was not (or not wholly) declared.
    pub inferred: Option<String>,
    /// Unit of the type that values may have been rounded to only when they were recorded; 0 where not.
    pub recorded_unit: f64,
}

/// Reads or infers the arithmetic of a recording from the rows at `positions`.
pub fn of(recording: &dyn Recording, positions: &[u32]) -> Declared {
    let stored = storage_shown(recording, positions);
    let producer = recording.producer();
    if let Some(Ok(numerics)) = producer.numerics.as_deref().map(str::parse::<Numerics>) {
        let kept = stored == numerics.storage || is_kept_in(recording, positions, numerics.storage);
        return declared(numerics, stored, kept);
    }
    let numerics = match stored {
        Storage::F32 => Numerics::default(),
        Storage::F16 => Numerics { products: Products::F16, storage: stored, kv: stored, flash: false },
        Storage::Bf16 => Numerics { products: Products::Bf16, storage: stored, kv: stored, flash: false },
    };
    let why = "the dump does not declare an arithmetic that parity knows";
    let shown = match stored {
        Storage::F32 => "its values need f32",
        Storage::F16 => "all its values are f16 numbers",
        Storage::Bf16 => "all its values are bf16 numbers",
    };
    let inferred = Some(format!("{why}; {shown}: judged as `{numerics}`{}", flag(numerics)));
    Declared { numerics, inferred, recorded_unit: unit_beyond_f32(stored) }
}

/// The flag that declares an arithmetic.
fn flag(numerics: Numerics) -> String {
    format!(" (declared by --numerics '{numerics}', of a reference by --reference-numerics)")
}

/// The unit of a type narrower than f32; 0 for f32, which recordings lose nothing to.
fn unit_beyond_f32(stored: Storage) -> f64 {
    if stored == Storage::F32 { 0.0 } else { storage_unit(stored) }
}

/// A declaration, corrected where the data are coarser than it says, or finer: no value is `kept` in the type it names.
fn declared(numerics: Numerics, stored: Storage, kept: bool) -> Declared {
    if !kept && numerics.storage != Storage::F32 {
        let judged = Numerics { storage: Storage::F32, ..numerics };
        let inferred = format!(
            "the dump declares `{numerics}`, but no tensor of it holds values of that storage type: judged as \
             `{judged}`{}",
            flag(judged)
        );
        return Declared { numerics: judged, inferred: Some(inferred), recorded_unit: 0.0 };
    }
    if numerics.storage != Storage::F32 || stored == Storage::F32 {
        return Declared { numerics, inferred: None, recorded_unit: unit_beyond_f32(stored) };
    }
    let judged = Numerics { storage: stored, ..numerics };
    let inferred = format!(
        "the dump declares `{numerics}`, but all its values are those of a narrower type: judged as `{judged}`{}",
        flag(judged)
    );
    Declared { numerics: judged, inferred: Some(inferred), recorded_unit: unit_beyond_f32(stored) }
}

/// Whether a tensor's values at `positions` are all numbers of a type, and not all 0.
fn is_kept_in(recording: &dyn Recording, positions: &[u32], storage: Storage) -> bool {
    let mut row = Vec::new();
    recording.checkpoints().into_iter().filter(|id| id.kind() != Kind::Embed).any(|id| {
        let mut seen = false;
        let all = positions.iter().all(|&position| {
            let Some(row) = recording.row(id, position, &mut row) else { return true };
            seen |= row.iter().any(|x| *x != 0.0);
            row.iter().all(|&x| storage.holds(x))
        });
        seen && all
    })
}

/// The narrowest type that holds every value at `positions`.
fn storage_shown(recording: &dyn Recording, positions: &[u32]) -> Storage {
    let (mut half, mut brain, mut seen) = (true, true, false);
    let mut row = Vec::new();
    for checkpoint in recording.checkpoints() {
        // The embedding shows the type of the table, not that of the engine.
        if checkpoint.kind() == Kind::Embed {
            continue;
        }
        for &position in positions {
            let Some(row) = recording.row(checkpoint, position, &mut row) else { continue };
            seen |= row.iter().any(|x| *x != 0.0);
            half &= row.iter().all(|&x| Storage::F16.holds(x));
            brain &= row.iter().all(|&x| Storage::Bf16.holds(x));
            if !half && !brain {
                return Storage::F32;
            }
        }
    }
    match (seen, brain, half) {
        (false, ..) => Storage::F32,
        (_, true, _) => Storage::Bf16,
        (_, _, true) => Storage::F16,
        _ => Storage::F32,
    }
}
