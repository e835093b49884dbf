//! Bindings of Mach-O as chains: every word that the loader changes says which symbol it gets and how far away the next is.

use crate::bytes::Bytes;
use crate::macho::{Segment, plain};
use crate::{Found, Result, Unreadable};

/// A page without a chain, and one with several.
const NO_CHAIN: u16 = 0xffff;
const SEVERAL: u16 = 0x8000;
/// Forms of words whose links count in fours and whose imports are 24 bits: targets are addresses in one, offsets in the other.
const FORMS: [u16; 2] = [2, 6];
/// The bit of a word that is bound to a symbol.
const BOUND: u64 = 1 << 63;
/// Bytes of a link's unit.
const UNIT: u64 = 4;

/// The table of imports.
struct Table<'a> {
    entries: Bytes<'a>,
    names: Bytes<'a>,
    count: u32,
    form: u32,
}

impl<'a> Table<'a> {
    /// The name of an import; `None` of an address within it, or of a name that is not read.
    fn name(&self, index: u64, word_addend: u64) -> Result<Option<&'a str>> {
        if index >= u64::from(self.count) {
            return Err(Unreadable("it binds to an import that it does not have"));
        }
        let (at, addend) = match self.form {
            1 => (u64::from(self.entries.u32(index * 4)? >> 9), 0),
            2 => (u64::from(self.entries.u32(index * 8)? >> 9), u64::from(self.entries.u32(index * 8 + 4)?)),
            3 => (self.entries.u64(index * 16)? >> 32, self.entries.u64(index * 16 + 8)?),
            _ => return Err(Unreadable("its imports are of a form that is not known")),
        };
        Ok(plain(self.names.name(at)).filter(|_| addend == 0 && word_addend == 0))
    }
}

/// Adds the slots that chains go through.
pub fn slots<'a>(
    fixups: Bytes<'a>,
    file: Bytes<'a>,
    segments: &[Segment],
    found: &mut Found<'a>,
) -> Result<()> {
    let [_, starts, imports, names, count, form, packed] = {
        let mut words = [0; 7];
        for (at, word) in (0..).step_by(4).zip(&mut words) {
            *word = fixups.u32(at)?;
        }
        words
    };
    if packed != 0 {
        return Err(Unreadable("names of its imports are compressed"));
    }
    let [entries, names] = [fixups.from(u64::from(imports))?, fixups.from(u64::from(names))?];
    let table = Table { entries, names, count, form };
    let starts = fixups.from(u64::from(starts))?;
    let count = u64::from(starts.u32(0)?);
    if count > segments.len() as u64 {
        return Err(Unreadable("it binds in segments that it does not have"));
    }
    for index in 0..count {
        let at = starts.u32(4 + 4 * index)?;
        if at != 0 {
            segment(starts.from(u64::from(at))?, file, segments, &table, found)?;
        }
    }
    Ok(())
}

/// The chains of one segment.
fn segment<'a>(
    start: Bytes<'a>,
    file: Bytes<'a>,
    segments: &[Segment],
    table: &Table<'a>,
    found: &mut Found<'a>,
) -> Result<()> {
    let (page_bytes, form, address) = (u64::from(start.u16(4)?), start.u16(6)?, start.u64(8)?);
    if !FORMS.contains(&form) {
        return Err(Unreadable("its words are of a form that is not known"));
    }
    let segment = segments.iter().find(|segment| segment.address == address);
    let segment = segment.ok_or(Unreadable("it binds in a segment that it does not have"))?;
    let held = file.part(segment.offset, segment.length)?;
    for page in 0..start.u16(20)? {
        let first = start.u16(22 + 2 * u64::from(page))?;
        if first == NO_CHAIN {
            continue;
        }
        if first & SEVERAL != 0 {
            return Err(Unreadable("it has a page of several chains"));
        }
        let mut at = u64::from(page) * page_bytes + u64::from(first);
        loop {
            let word = held.u64(at)?;
            // The lowest 24 bits are the import, the next eight are added to its address.
            let name =
                if word & BOUND == 0 { None } else { table.name(word & 0xff_ffff, word >> 24 & 0xff)? };
            found.push(name, address.wrapping_add(at))?;
            match word >> 51 & 0xfff {
                0 => break,
                next => at += next * UNIT,
            }
        }
    }
    Ok(())
}
