//! Bindings of Mach-O as a list of instructions: which symbol, which segment, how far in it, and to bind there.

use crate::bytes::Bytes;
use crate::macho::{Segment, plain};
use crate::{Found, Result, Unreadable, WORD};

/// The upper half of an instruction's byte; the lower is a number.
mod instruction {
    pub const DONE: u8 = 0x00;
    pub const LIBRARY: u8 = 0x10;
    pub const LIBRARY_FAR: u8 = 0x20;
    pub const LIBRARY_SPECIAL: u8 = 0x30;
    pub const SYMBOL: u8 = 0x40;
    pub const TYPE: u8 = 0x50;
    pub const ADDEND: u8 = 0x60;
    pub const SEGMENT: u8 = 0x70;
    pub const ADD_ADDRESS: u8 = 0x80;
    pub const BIND: u8 = 0x90;
    pub const BIND_AND_ADD: u8 = 0xa0;
    pub const BIND_AND_ADD_WORDS: u8 = 0xb0;
    pub const BIND_MANY: u8 = 0xc0;
}

/// Reads a list from its start on.
struct Reader<'a> {
    list: Bytes<'a>,
    at: u64,
}

impl<'a> Reader<'a> {
    fn byte(&mut self) -> Result<u8> {
        let byte = self.list.u8(self.at)?;
        self.at += 1;
        Ok(byte)
    }

    /// A number in groups of seven bits, least first. A sign in the last of them counts for nothing here: addresses wrap, and
    /// of an addend it is asked only whether it is 0.
    fn number(&mut self) -> Result<u64> {
        let mut number = 0;
        for shift in (0..).step_by(7) {
            let byte = self.byte()?;
            if shift < 64 {
                number |= u64::from(byte & 0x7f) << shift;
            }
            if byte & 0x80 == 0 {
                break;
            }
        }
        Ok(number)
    }

    /// A name that ends with a zero; `None` of one that is not read.
    fn name(&mut self) -> Result<Option<&'a str>> {
        let name = self.list.name(self.at);
        while self.byte()? != 0 {}
        Ok(name)
    }
}

/// What the next binding is of.
#[derive(Default)]
struct State<'a> {
    name: Option<&'a str>,
    addend: u64,
    address: u64,
}

impl<'a> State<'a> {
    fn bind(&mut self, skipped: u64, found: &mut Found<'a>) -> Result<()> {
        found.push(plain(self.name).filter(|_| self.addend == 0), self.address)?;
        self.address = self.address.wrapping_add(WORD).wrapping_add(skipped);
        Ok(())
    }
}

/// Adds the slots that a list binds.
pub fn slots<'a>(list: Bytes<'a>, segments: &[Segment], found: &mut Found<'a>) -> Result<()> {
    let (mut reader, mut state) = (Reader { list, at: 0 }, State::default());
    while reader.at < list.len() {
        let byte = reader.byte()?;
        let small = u64::from(byte & 0xf);
        match byte & 0xf0 {
            // Of first uses every binding ends so; zeros at the end of a list are padding.
            instruction::DONE | instruction::LIBRARY | instruction::LIBRARY_SPECIAL | instruction::TYPE => {}
            instruction::LIBRARY_FAR => drop(reader.number()?),
            instruction::SYMBOL => state.name = reader.name()?,
            instruction::ADDEND => state.addend = reader.number()?,
            instruction::SEGMENT => {
                let segment = usize::try_from(small).ok().and_then(|index| segments.get(index));
                let segment = segment.ok_or(Unreadable("it binds in a segment that it does not have"))?;
                state.address = segment.address.wrapping_add(reader.number()?);
            }
            instruction::ADD_ADDRESS => state.address = state.address.wrapping_add(reader.number()?),
            instruction::BIND => state.bind(0, found)?,
            instruction::BIND_AND_ADD => {
                let skipped = reader.number()?;
                state.bind(skipped, found)?;
            }
            instruction::BIND_AND_ADD_WORDS => state.bind(small * WORD, found)?,
            instruction::BIND_MANY => {
                let (times, skipped) = (reader.number()?, reader.number()?);
                for _ in 0..times {
                    state.bind(skipped, found)?;
                }
            }
            _ => return Err(Unreadable("it binds by an instruction that is not known")),
        }
    }
    Ok(())
}
