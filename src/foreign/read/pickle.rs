//! Python's pickle format as data: a parser of what tensors are made of. Nothing of it is ever executed: a call of a
//! function is a node with the function's name, and only those that make tensors mean something to the reader.
//!
//! Opcodes: `pickletools.py` of Python, protocols 0 to 5.

use std::collections::HashMap;

/// Values that one pickle may have, and that may be looked at in one.
pub const VALUES_MAX: usize = 1 << 22;

/// A value by its place among all of a pickle.
pub type Ref = usize;

/// A value of a pickle.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// None, and whatever is of no concern.
    Other,
    /// A truth value or a whole number.
    Int(i64),
    /// A text.
    Text(String),
    /// A tuple or a list.
    List(Vec<Ref>),
    /// Keys and values in their order.
    Dict(Vec<(Ref, Ref)>),
    /// A class or a function, `module.name`.
    Global(String),
    /// A call: of what, with which arguments, which is a list.
    Call(Ref, Ref),
    /// An object that lies outside of the pickle.
    Outside(Ref),
}

/// A pickle that was read.
pub struct Pickle {
    values: Vec<Value>,
    /// What it is of.
    pub root: Ref,
}

impl Pickle {
    /// Reads a pickle; why it cannot be read otherwise.
    ///
    /// # Errors
    /// An opcode that is none, or what ends in the middle.
    pub fn parse(bytes: &[u8]) -> Result<Pickle, String> {
        let mut machine =
            Machine { bytes, at: 0, values: Vec::new(), stack: Vec::new(), memo: HashMap::new() };
        let root = machine.run()?;
        Ok(Pickle { values: machine.values, root })
    }

    /// A value.
    pub fn get(&self, at: Ref) -> &Value {
        self.values.get(at).unwrap_or(&Value::Other)
    }

    /// A text.
    pub fn text(&self, at: Ref) -> Option<&str> {
        match self.get(at) {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A number that counts something.
    pub fn count(&self, at: Ref) -> Option<usize> {
        match self.get(at) {
            Value::Int(n) => usize::try_from(*n).ok(),
            _ => None,
        }
    }

    /// The members of a tuple or list; of a call that wraps one (torch.Size), of its argument.
    pub fn list(&self, at: Ref) -> Option<&[Ref]> {
        match self.get(at) {
            Value::List(members) => Some(members),
            Value::Call(_, arguments) => match self.get(*arguments) {
                Value::List(members) if members.len() == 1 => match self.get(members[0]) {
                    Value::List(members) => Some(members),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        }
    }
}

/// What the stack holds: a value, or a mark.
#[derive(Clone, Copy)]
enum Slot {
    Mark,
    Value(Ref),
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Slot>,
    memo: HashMap<usize, Ref>,
}

impl<'a> Machine<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| format!("it ends within an entry at byte {}", self.at))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn number(&mut self, size: usize) -> Result<usize, String> {
        let mut wide = [0; size_of::<u64>()];
        wide[..size].copy_from_slice(self.take(size)?);
        usize::try_from(u64::from_le_bytes(wide)).map_err(|e| e.to_string())
    }

    fn line(&mut self) -> Result<String, String> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|byte| *byte == b'\n').ok_or("it ends within a line")?;
        self.at += end + 1;
        Ok(String::from_utf8_lossy(&rest[..end]).into_owned())
    }

    fn push(&mut self, value: Value) -> Result<(), String> {
        if self.values.len() >= VALUES_MAX {
            return Err(format!("it has more than {VALUES_MAX} values"));
        }
        self.values.push(value);
        self.stack.push(Slot::Value(self.values.len() - 1));
        Ok(())
    }

    fn text(&mut self, length: usize) -> Result<(), String> {
        let bytes = self.take(length)?;
        self.push(Value::Text(String::from_utf8_lossy(bytes).into_owned()))
    }

    fn pop(&mut self) -> Result<Ref, String> {
        match self.stack.pop() {
            Some(Slot::Value(value)) => Ok(value),
            _ => Err(format!("a value is missing at byte {}", self.at)),
        }
    }

    /// The values above the last mark, which goes as well.
    fn marked(&mut self) -> Result<Vec<Ref>, String> {
        let mark = self.stack.iter().rposition(|slot| matches!(slot, Slot::Mark));
        let mark = mark.ok_or_else(|| format!("a mark is missing at byte {}", self.at))?;
        let above = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(above
            .into_iter()
            .filter_map(|slot| if let Slot::Value(value) = slot { Some(value) } else { None })
            .collect())
    }

    fn top(&self) -> Result<Ref, String> {
        match self.stack.last() {
            Some(Slot::Value(value)) => Ok(*value),
            _ => Err(format!("a value is missing at byte {}", self.at)),
        }
    }

    fn memoize(&mut self, key: usize) -> Result<(), String> {
        let top = self.top()?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, key: usize) -> Result<(), String> {
        let value = *self.memo.get(&key).ok_or_else(|| format!("entry {key} is missing"))?;
        self.stack.push(Slot::Value(value));
        Ok(())
    }

    fn tuple(&mut self, count: usize) -> Result<(), String> {
        let mut members = (0..count).map(|_| self.pop()).collect::<Result<Vec<Ref>, _>>()?;
        members.reverse();
        self.push(Value::List(members))
    }

    fn call(&mut self) -> Result<(), String> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        self.push(Value::Call(function, arguments))
    }

    /// Puts members behind those that a list or dictionary has; other objects keep none.
    fn extend(&mut self, members: &[Ref]) -> Result<(), String> {
        let top = self.top()?;
        match self.values.get_mut(top) {
            Some(Value::List(known)) => known.extend(members),
            Some(Value::Dict(known)) => known.extend(members.chunks_exact(2).map(|pair| (pair[0], pair[1]))),
            // An ordered dictionary is a call without arguments, which is filled afterwards.
            Some(call @ Value::Call(..)) if members.len() >= 2 => {
                *call = Value::Dict(members.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect());
            }
            _ => {}
        }
        Ok(())
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), String> {
        self.push(Value::Global(format!("{module}.{name}")))
    }

    fn run(&mut self) -> Result<Ref, String> {
        loop {
            let opcode = self.take(1)?[0];
            if opcode == b'.' {
                return self.pop();
            }
            self.step(opcode)?;
        }
    }

    fn step(&mut self, opcode: u8) -> Result<(), String> {
        match opcode {
            0x80 => self.take(1).map(drop),
            0x95 => self.take(8).map(drop),
            b'(' => {
                self.stack.push(Slot::Mark);
                Ok(())
            }
            b'0' => self.pop().map(drop),
            b'1' => self.marked().map(drop),
            b'2' => self.top().map(|top| self.stack.push(Slot::Value(top))),
            b'N' => self.push(Value::Other),
            0x88 => self.push(Value::Int(1)),
            0x89 => self.push(Value::Int(0)),
            b'K' | b'M' => {
                let value = self.number(if opcode == b'K' { 1 } else { 2 })? as i64;
                self.push(Value::Int(value))
            }
            b'J' => {
                let value = self.number(4)? as u32 as i32;
                self.push(Value::Int(value.into()))
            }
            0x8a => {
                let length = self.number(1)?;
                let value = long(self.take(length)?);
                self.push(value)
            }
            b'I' | b'L' => {
                let line = self.line()?;
                let number = line.trim_end_matches('L').parse().map_or(Value::Other, Value::Int);
                self.push(number)
            }
            b'F' | b'S' | b'P' => {
                let line = self.line()?;
                let outside = opcode == b'P';
                self.push(Value::Text(line.trim_matches(['\'', '"']).to_owned()))?;
                if outside { self.outside() } else { Ok(()) }
            }
            b'V' => {
                let line = self.line()?;
                self.push(Value::Text(line))
            }
            b'G' => self.take(8).map(drop).and_then(|()| self.push(Value::Other)),
            _ => self.step_of_objects(opcode),
        }
    }

    fn outside(&mut self) -> Result<(), String> {
        let id = self.pop()?;
        self.push(Value::Outside(id))
    }

    fn step_of_objects(&mut self, opcode: u8) -> Result<(), String> {
        match opcode {
            b'X' | b'T' | b'B' => self.number(4).and_then(|length| self.text(length)),
            0x8c | b'U' | b'C' => self.number(1).and_then(|length| self.text(length)),
            0x8d | 0x8e | 0x96 => self.number(8).and_then(|length| self.text(length)),
            b')' | b']' => self.push(Value::List(Vec::new())),
            b'}' => self.push(Value::Dict(Vec::new())),
            0x8f => self.push(Value::List(Vec::new())),
            b't' | b'l' | 0x91 => {
                let members = self.marked()?;
                self.push(Value::List(members))
            }
            0x85 => self.tuple(1),
            0x86 => self.tuple(2),
            0x87 => self.tuple(3),
            b'd' => {
                let members = self.marked()?;
                self.push(Value::Dict(members.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()))
            }
            b'a' => {
                let member = self.pop()?;
                self.extend(&[member])
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.extend(&[key, value])
            }
            b'e' | b'u' | 0x90 => {
                let members = self.marked()?;
                self.extend(&members)
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(&module, &name)
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let text = |at: Ref| match self.values.get(at) {
                    Some(Value::Text(text)) => text.clone(),
                    _ => String::new(),
                };
                let (module, name) = (text(module), text(name));
                self.global(&module, &name)
            }
            b'R' | 0x81 => self.call(),
            0x92 => self.pop().and_then(|_| self.call()),
            // The state of an object: of no concern.
            b'b' => self.pop().map(drop),
            b'Q' => self.outside(),
            b'q' => self.number(1).and_then(|key| self.memoize(key)),
            b'r' => self.number(4).and_then(|key| self.memoize(key)),
            0x94 => self.memoize(self.memo.len()),
            b'p' => {
                let key = self.line()?.parse().map_err(|_| "a memo without a number".to_owned())?;
                self.memoize(key)
            }
            b'h' => self.number(1).and_then(|key| self.recall(key)),
            b'j' => self.number(4).and_then(|key| self.recall(key)),
            b'g' => {
                let key = self.line()?.parse().map_err(|_| "a memo without a number".to_owned())?;
                self.recall(key)
            }
            other => {
                Err(format!("opcode {other:#04x} at byte {} is none of a pickle of tensors", self.at - 1))
            }
        }
    }
}

/// A whole number of any length; beyond 64 bits it is of no concern.
fn long(bytes: &[u8]) -> Value {
    let mut wide =
        [if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 }; size_of::<i64>()];
    if bytes.len() > wide.len() {
        return Value::Other;
    }
    wide[..bytes.len()].copy_from_slice(bytes);
    Value::Int(i64::from_le_bytes(wide))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dictionary_is_read_and_nothing_is_called() {
        // {"a": (1, -2), "b": os.system("x")} as protocol 2 writes it.
        let bytes = b"\x80\x02}q\x00(X\x01\x00\x00\x00aK\x01J\xfe\xff\xff\xff\x86X\x01\x00\x00\x00bcos\nsystem\nX\x01\x00\x00\x00x\x85Ru.";
        let pickle = Pickle::parse(bytes).unwrap();
        let Value::Dict(entries) = pickle.get(pickle.root) else { panic!("no dictionary") };
        assert_eq!(pickle.text(entries[0].0), Some("a"));
        let numbers: Vec<_> = pickle.list(entries[0].1).unwrap().iter().map(|at| pickle.get(*at)).collect();
        assert_eq!(numbers, [&Value::Int(1), &Value::Int(-2)]);
        let Value::Call(function, _) = pickle.get(entries[1].1) else { panic!("no call") };
        assert_eq!(pickle.get(*function), &Value::Global("os.system".into()));
    }

    #[test]
    fn what_is_no_pickle_is_refused() {
        for bytes in [
            &b""[..],
            b".",
            b"\x80\x02",
            b"K",
            b"X\xff\xff\xff\xff",
            b"h\x05.",
            b"t.",
            b"\xfe.",
            b"(.",
            b"s.",
        ] {
            assert!(Pickle::parse(bytes).is_err(), "{bytes:?}");
        }
    }
}
