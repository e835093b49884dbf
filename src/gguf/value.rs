//! Metadata values: every type of the format, and how they are read as what a caller wants.

use std::fmt;

macro_rules! value_types {
    ($($variant:ident($t:ty) = $number:literal, $name:literal;)*) => {
        /// The type of a metadata value, numbered as in the file.
        #[allow(missing_docs)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum ValueType { $($variant = $number),* }

        impl ValueType {
            /// The type with this number in `enum gguf_type`.
            pub fn from_number(number: u32) -> Option<ValueType> {
                match number { $($number => Some(ValueType::$variant),)* _ => None }
            }

            /// As the specification spells it, in lower case.
            pub fn name(self) -> &'static str {
                match self { $(ValueType::$variant => $name),* }
            }
        }

        /// One metadata value.
        #[allow(missing_docs)]
        #[derive(Clone, Debug, PartialEq)]
        pub enum Value { $($variant($t)),* }

        /// A metadata array: all elements have one type.
        #[allow(missing_docs)]
        #[derive(Clone, Debug, PartialEq)]
        pub enum Array { $($variant(Vec<$t>)),* }

        impl Value {
            /// The type it is stored in.
            pub fn value_type(&self) -> ValueType {
                match self { $(Value::$variant(_) => ValueType::$variant),* }
            }
        }

        impl Array {
            /// The type of the elements.
            pub fn element_type(&self) -> ValueType {
                match self { $(Array::$variant(_) => ValueType::$variant),* }
            }

            /// Number of elements.
            pub fn len(&self) -> usize {
                match self { $(Array::$variant(items) => items.len()),* }
            }

            /// Element `index` as a value of its own.
            pub fn get(&self, index: usize) -> Option<Value> {
                match self { $(Array::$variant(items) => items.get(index).cloned().map(Value::$variant)),* }
            }
        }
    };
}

value_types! {
    U8(u8) = 0, "uint8";
    I8(i8) = 1, "int8";
    U16(u16) = 2, "uint16";
    I16(i16) = 3, "int16";
    U32(u32) = 4, "uint32";
    I32(i32) = 5, "int32";
    F32(f32) = 6, "float32";
    Bool(bool) = 7, "bool";
    String(String) = 8, "string";
    Array(Array) = 9, "array";
    U64(u64) = 10, "uint64";
    I64(i64) = 11, "int64";
    F64(f64) = 12, "float64";
}

impl Array {
    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as values of their own.
    pub fn values(&self) -> impl Iterator<Item = Value> + '_ {
        (0..self.len()).filter_map(|index| self.get(index))
    }
}

impl Value {
    /// The value of any integer type.
    pub fn as_integer(&self) -> Option<i128> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::I8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::U64(v) => Some(v.into()),
            Value::I64(v) => Some(v.into()),
            _ => None,
        }
    }

    /// The value of either float type.
    pub fn as_float(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }
}

/// Text that is printed where a string is only shown.
const SHOWN_CHARS: usize = 60;
/// Elements of an array that are shown.
const SHOWN_ELEMENTS: usize = 6;

/// Short: long strings and arrays are cut.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::F32(v) => write!(f, "{v}"),
            Value::F64(v) => write!(f, "{v}"),
            Value::Bool(v) => write!(f, "{v}"),
            Value::String(text) => {
                let short: String = text.chars().take(SHOWN_CHARS).collect();
                let more = if short.len() < text.len() { "…" } else { "" };
                write!(f, "{short:?}{more}")
            }
            Value::Array(array) => {
                write!(f, "{} x {} [", array.len(), array.element_type().name())?;
                for (index, value) in array.values().take(SHOWN_ELEMENTS).enumerate() {
                    write!(f, "{}{value}", if index > 0 { ", " } else { "" })?;
                }
                write!(f, "{}]", if array.len() > SHOWN_ELEMENTS { ", …" } else { "" })
            }
            integer => write!(f, "{}", integer.as_integer().unwrap_or_default()),
        }
    }
}

/// A type that metadata values are read as.
pub trait FromValue<'a>: Sized {
    /// What a value has to be, for the error.
    const EXPECTED: &'static str;

    /// The value, where it has a type that converts without loss.
    fn from_value(value: &'a Value) -> Option<Self>;
}

macro_rules! from_integer {
    ($($t:ty),*) => {$(
        impl FromValue<'_> for $t {
            const EXPECTED: &'static str = concat!("an integer that fits ", stringify!($t));
            fn from_value(value: &Value) -> Option<Self> {
                value.as_integer()?.try_into().ok()
            }
        }
        impl FromValue<'_> for Vec<$t> {
            const EXPECTED: &'static str = concat!("an array of integers that fit ", stringify!($t));
            fn from_value(value: &Value) -> Option<Self> {
                let Value::Array(array) = value else { return None };
                array.values().map(|value| <$t>::from_value(&value)).collect()
            }
        }
    )*};
}
from_integer!(u32, i32, u64);

impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "a float";
    fn from_value(value: &Value) -> Option<Self> {
        value.as_float().map(|v| v as f32)
    }
}

impl FromValue<'_> for Vec<f32> {
    const EXPECTED: &'static str = "an array of floats";
    fn from_value(value: &Value) -> Option<Self> {
        let Value::Array(array) = value else { return None };
        array.values().map(|value| f32::from_value(&value)).collect()
    }
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "a bool";
    fn from_value(value: &Value) -> Option<Self> {
        if let Value::Bool(v) = *value { Some(v) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "a string";
    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::String(v) = value { Some(v) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a [String] {
    const EXPECTED: &'static str = "an array of strings";
    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::Array(Array::String(v)) = value { Some(v) } else { None }
    }
}
