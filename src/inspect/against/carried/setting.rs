//! One setting, as config.json or a GGUF file has it.

use std::fmt;

use serde_json::Value as Json;

use crate::gguf::Value;

/// A number, a switch, a word, or a number for each layer or axis.
#[derive(Clone, Debug, PartialEq)]
pub enum Setting {
    /// Any number.
    Number(f64),
    /// True or false.
    Flag(bool),
    /// A word.
    Text(String),
    /// Several numbers, switches as 0 and 1.
    List(Vec<f64>),
}

impl Setting {
    /// What a JSON value says; nothing where it is null, an object or a list of other things.
    pub fn from_json(value: &Json) -> Option<Setting> {
        Some(match value {
            Json::Number(number) => Setting::Number(number.as_f64()?),
            Json::Bool(flag) => Setting::Flag(*flag),
            Json::String(text) => Setting::Text(text.clone()),
            Json::Array(items) => {
                let number =
                    |item: &Json| item.as_f64().or(item.as_bool().map(|flag| f64::from(u8::from(flag))));
                Setting::List(items.iter().map(number).collect::<Option<_>>()?)
            }
            Json::Null | Json::Object(_) => return None,
        })
    }

    /// What a metadata value says.
    pub fn from_gguf(value: &Value) -> Option<Setting> {
        Some(match value {
            Value::Bool(flag) => Setting::Flag(*flag),
            Value::String(text) => Setting::Text(text.clone()),
            Value::Array(array) => {
                Setting::List(array.values().map(|value| number(&value)).collect::<Option<_>>()?)
            }
            other => Setting::Number(number(other)?),
        })
    }

    /// The number, where it is one, or where all of a list are the same.
    pub fn number(&self) -> Option<f64> {
        match self {
            Setting::Number(number) => Some(*number),
            Setting::Flag(flag) => Some(f64::from(u8::from(*flag))),
            Setting::List(list) => {
                list.first().copied().filter(|first| list.iter().all(|item| item == first))
            }
            Setting::Text(_) => None,
        }
    }

    /// Whether two say the same: numbers as f32, in which a file has most of them.
    pub fn is(&self, other: &Setting) -> bool {
        let same = |a: f64, b: f64| a == b || a as f32 == b as f32;
        match (self, other) {
            (Setting::List(a), Setting::List(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(*a, *b))
            }
            (Setting::Text(a), Setting::Text(b)) => a == b,
            // Layers without heads, or without experts, have none of what the others have.
            (Setting::List(list), Setting::Number(one)) | (Setting::Number(one), Setting::List(list)) => {
                let mut some = list.iter().filter(|number| **number != 0.0).peekable();
                some.peek().is_some() && some.all(|number| same(*number, *one))
            }
            _ => self.number().zip(other.number()).is_some_and(|(a, b)| same(a, b)),
        }
    }
}

/// Any number or switch. An f32 reads as the shortest decimal that gives it, which is what people wrote.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::F32(number) => number.to_string().parse().ok(),
        Value::Bool(flag) => Some(f64::from(u8::from(*flag))),
        other => other.as_float().or(other.as_integer().map(|integer| integer as f64)),
    }
}

/// Numbers of a list that are shown.
const SHOWN: usize = 8;

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Setting::Number(number) => f.write_str(&plain(*number)),
            Setting::Flag(flag) => write!(f, "{flag}"),
            Setting::Text(text) => f.write_str(text),
            Setting::List(list) => {
                let shown: Vec<String> = list.iter().take(SHOWN).map(|number| plain(*number)).collect();
                write!(f, "[{}{}]", shown.join(", "), if list.len() > SHOWN { ", …" } else { "" })
            }
        }
    }
}

/// A number as people write it: 1e-6, 10000, 0.25.
pub fn plain(number: f64) -> String {
    match number != 0.0 && !(1e-3..1e9).contains(&number.abs()) {
        true => format!("{number:e}"),
        false => number.to_string(),
    }
}
