//! In which order each scheme adds, and where it rounds: the plainest statement of docs/summation.md, as expressions.
//!
//! Positions are ranks counted from the slice's first rank. An addition of several terms is made in the order given, at the
//! accumulator's precision, and rounded once to the element type.

use half::{bf16, f16};
use penstock_core::Members;
use penstock_core::types::{Dtype, Rank};
use penstock_core::way::Algorithm;
use penstock_core::wire::Op;

/// How one part of a slice is summed.
#[derive(Debug)]
enum Sum {
    /// The contribution of a position.
    Own(u32),
    /// These, one after the other.
    Of(Vec<Sum>),
}

/// Into how many near-equal parts a slice is cut, each with a sum of its own.
fn part_count(algorithm: Algorithm, p: u32) -> u32 {
    match algorithm {
        Algorithm::Ring => p,
        Algorithm::Butterfly => 1 << p.ilog2(),
        Algorithm::Store | Algorithm::Central | Algorithm::Tree => 1,
    }
}

fn sum_of(algorithm: Algorithm, p: u32, part: u32) -> Sum {
    match algorithm {
        Algorithm::Store | Algorithm::Central => Sum::Of((0..p).map(Sum::Own).collect()),
        Algorithm::Tree => tree(0, p),
        // From the position after the part's own once around, each adding what came to its own.
        Algorithm::Ring => {
            (2..=p).fold(Sum::Own((part + 1) % p), |came, i| Sum::Of(vec![Sum::Own((part + i) % p), came]))
        }
        Algorithm::Butterfly => butterfly(part, p, p.ilog2()),
    }
}

fn tree(position: u32, p: u32) -> Sum {
    let children = (0..32).take_while(|bit| position & (1 << bit) == 0).map(|bit| position + (1 << bit));
    let mut terms = vec![Sum::Own(position)];
    terms.extend(children.take_while(|child| *child < p).map(|child| tree(child, p)));
    Sum::Of(terms)
}

/// What a position of the core has after so many levels; the partners of the last level are neighbours.
fn butterfly(position: u32, p: u32, levels: u32) -> Sum {
    let core = 1 << p.ilog2();
    if levels == 0 {
        let folded = position + core;
        return if folded < p {
            Sum::Of(vec![Sum::Own(position), Sum::Own(folded)])
        } else {
            Sum::Own(position)
        };
    }
    let partner = position ^ (core >> levels);
    Sum::Of(vec![butterfly(position, p, levels - 1), butterfly(partner, p, levels - 1)])
}

/// An element type: how it is stored and how it is combined.
trait Element: Copy {
    /// What additions are made in.
    type Wide: Copy;
    const BYTES: usize;
    fn read(bytes: &[u8]) -> Self::Wide;
    fn write(value: Self::Wide) -> Vec<u8>;
    fn combine(op: Op, a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn divide(value: Self::Wide, by: u32) -> Self::Wide;
}

macro_rules! float {
    ($type:ty, $wide:ty, $widen:expr, $narrow:expr) => {
        impl Element for $type {
            type Wide = $wide;
            const BYTES: usize = size_of::<$type>();
            fn read(bytes: &[u8]) -> $wide {
                let mut stored = [0; size_of::<$type>()];
                stored.copy_from_slice(bytes);
                $widen(<$type>::from_le_bytes(stored))
            }
            fn write(value: $wide) -> Vec<u8> {
                let stored: $type = $narrow(value);
                stored.to_le_bytes().to_vec()
            }
            fn combine(op: Op, a: $wide, b: $wide) -> $wide {
                match op {
                    Op::Min => {
                        if b < a {
                            b
                        } else {
                            a
                        }
                    }
                    Op::Max => {
                        if b > a {
                            b
                        } else {
                            a
                        }
                    }
                    _ => a + b,
                }
            }
            fn divide(value: $wide, by: u32) -> $wide {
                value / by as $wide
            }
        }
    };
}

macro_rules! integer {
    ($type:ty) => {
        impl Element for $type {
            type Wide = $type;
            const BYTES: usize = size_of::<$type>();
            fn read(bytes: &[u8]) -> $type {
                let mut stored = [0; size_of::<$type>()];
                stored.copy_from_slice(bytes);
                <$type>::from_le_bytes(stored)
            }
            fn write(value: $type) -> Vec<u8> {
                value.to_le_bytes().to_vec()
            }
            fn combine(op: Op, a: $type, b: $type) -> $type {
                match op {
                    Op::Min => a.min(b),
                    Op::Max => a.max(b),
                    _ => a.wrapping_add(b),
                }
            }
            fn divide(_: $type, _: u32) -> $type {
                unreachable!("integers have no average")
            }
        }
    };
}

float!(f32, f32, |x| x, |x| x);
float!(f64, f64, |x| x, |x| x);
float!(f16, f32, f16::to_f32, f16::from_f32);
float!(bf16, f32, bf16::to_f32, bf16::from_f32);
integer!(i64);
integer!(i32);
integer!(i16);
integer!(i8);
integer!(u8);

/// Evaluates a sum for the element at `at`; `divisor` is for the last addition. `None` if nobody contributes.
fn value<E: Element>(
    sum: &Sum,
    rows: &[Option<&[u8]>],
    at: usize,
    op: Op,
    divisor: Option<u32>,
) -> Option<Vec<u8>> {
    let terms = match sum {
        Sum::Own(position) => {
            let row: Option<&[u8]> = rows[*position as usize];
            let stored = row.map(|row| row[at..at + E::BYTES].to_vec());
            return stored.map(|stored| match divisor {
                Some(divisor) => E::write(E::divide(E::read(&stored), divisor)),
                None => stored,
            });
        }
        Sum::Of(terms) => terms,
    };
    let mut terms = terms.iter().filter_map(|term| value::<E>(term, rows, at, op, None));
    let first = terms.next()?;
    let mut rest = terms.map(|term| E::read(&term)).peekable();
    // Nothing is added and nothing divided: the bits stay, those of a NaN included.
    if rest.peek().is_none() && divisor.is_none() {
        return Some(first);
    }
    let total = rest.fold(E::read(&first), |total, x| E::combine(op, total, x));
    Some(E::write(divisor.map_or(total, |divisor| E::divide(total, divisor))))
}

/// How the contributions to a slice become one sum.
#[derive(Debug, Clone, Copy)]
pub struct Summation {
    /// How the sum is made.
    pub algorithm: Algorithm,
    /// Its element type.
    pub dtype: Dtype,
    /// Its wire type: if it is another, all but the owner's contribution are rounded to it, and so is the result.
    pub wire: Dtype,
    /// What is done with the contributions.
    pub op: Op,
    /// Ranks that take part: what an average divides by.
    pub active: u32,
}

/// As [`reduce`], where the ranks of each group sum among themselves before: in rank order, unrounded but for what their type cannot
/// hold. The sum of a group is its first rank's contribution.
#[must_use]
pub fn reduce_in_groups<'a>(
    how: Summation,
    owner: Rank,
    rows: &[Option<&[u8]>],
    groups: impl Iterator<Item = &'a Members>,
) -> Option<Vec<u8>> {
    let op = if how.op == Op::Average { Op::Sum } else { how.op };
    let inside = Summation { wire: how.dtype, op, active: 1, ..how };
    let mut sums: Vec<Option<Vec<u8>>> = vec![None; rows.len()];
    for group in groups {
        let ranks = (0..).map(Rank).zip(rows);
        let rows: Vec<Option<&[u8]>> =
            ranks.map(|(rank, row)| row.filter(|_| group.contains(rank))).collect();
        sums[group.at(0).index()] = reduce(inside, owner, &rows);
    }
    let sums: Vec<Option<&[u8]>> = sums.iter().map(Option::as_deref).collect();
    reduce(how, owner, &sums)
}

/// The result for one slice: `rows` by rank, `None` for those that contribute nothing; `owner` is the slice's first rank.
#[must_use]
pub fn reduce(how: Summation, owner: Rank, rows: &[Option<&[u8]>]) -> Option<Vec<u8>> {
    if how.wire != how.dtype {
        let rounded = |(rank, row): (usize, &Option<&[u8]>)| {
            row.map(|row| if rank == owner.index() { row.to_vec() } else { through(how.wire, row) })
        };
        let rows: Vec<Option<Vec<u8>>> = rows.iter().enumerate().map(rounded).collect();
        let rows: Vec<Option<&[u8]>> = rows.iter().map(Option::as_deref).collect();
        let result = reduce(Summation { wire: how.dtype, ..how }, owner, &rows)?;
        return Some(through(how.wire, &result));
    }
    let present = || rows.iter().flatten();
    if how.op == Op::Copy {
        return present().next().map(|row| row.to_vec());
    }
    match how.dtype {
        Dtype::F32 => reduce_as::<f32>(how, owner, rows),
        Dtype::F64 => reduce_as::<f64>(how, owner, rows),
        Dtype::F16 => reduce_as::<f16>(how, owner, rows),
        Dtype::Bf16 => reduce_as::<bf16>(how, owner, rows),
        Dtype::I64 => reduce_as::<i64>(how, owner, rows),
        Dtype::I32 => reduce_as::<i32>(how, owner, rows),
        Dtype::I16 => reduce_as::<i16>(how, owner, rows),
        Dtype::I8 => reduce_as::<i8>(how, owner, rows),
        Dtype::U8 => reduce_as::<u8>(how, owner, rows),
        Dtype::Bytes => present().next().map(|row| row.to_vec()),
    }
}

/// Numbers in fp32, each as it is after its way through a half type.
#[must_use]
pub fn through(wire: Dtype, row: &[u8]) -> Vec<u8> {
    let one = |number: &[u8]| {
        let number = f32::read(number);
        let rounded =
            if wire == Dtype::F16 { f16::from_f32(number).to_f32() } else { bf16::from_f32(number).to_f32() };
        f32::write(rounded)
    };
    row.chunks_exact(4).flat_map(one).collect()
}

fn reduce_as<E: Element>(how: Summation, owner: Rank, rows: &[Option<&[u8]>]) -> Option<Vec<u8>> {
    let elems = rows.iter().flatten().next()?.len() / E::BYTES;
    let p = rows.len() as u32;
    // The store sums in rank order, whoever owns the slice; collectives count from its first rank.
    let first = if how.algorithm == Algorithm::Store { 0 } else { owner.index() };
    let by_position: Vec<Option<&[u8]>> = (0..rows.len()).map(|i| rows[(i + first) % rows.len()]).collect();
    let divisor = (how.op == Op::Average && how.active > 1).then_some(how.active);
    let parts = part_count(how.algorithm, p);
    let mut result = Vec::with_capacity(elems * E::BYTES);
    for part in 0..parts {
        let sum = sum_of(how.algorithm, p, part);
        // The first parts have one element more if there is a remainder.
        let (even, more) = (elems / parts as usize, elems % parts as usize);
        let len = even + usize::from((part as usize) < more);
        for _ in 0..len {
            let at = result.len();
            result.extend(value::<E>(&sum, &by_position, at, how.op, divisor)?);
        }
    }
    Some(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_sum_first_and_round_once_each() {
        // Numbers that are no halves, so that what is added when, and rounded when, shows.
        let [a, b, c, d] = [1.0f32 / 3.0, 1e7, -1e7, 0.7];
        let rows = [a, b, c, d].map(f32::to_le_bytes);
        let rows: Vec<Option<&[u8]>> = rows.iter().map(|row| Some(&row[..])).collect();
        let groups: Vec<Members> = [[0, 2], [1, 3]].map(|ranks| ranks.into_iter().map(Rank).collect()).into();
        let sum = |wire, groups: &[Members]| {
            let (algorithm, dtype, op) = (Algorithm::Store, Dtype::F32, Op::Average);
            let how = Summation { algorithm, dtype, wire, op, active: 4 };
            let bytes = reduce_in_groups(how, Rank(0), &rows, groups.iter()).unwrap();
            <f32 as Element>::read(&bytes).to_bits()
        };
        let want = |x: f32| x.to_bits();
        assert_eq!(sum(Dtype::F32, &groups), want(((a + c) + (b + d)) / 4.0));
        let alone: Vec<Members> = (0..4).map(|rank| [Rank(rank)].into_iter().collect()).collect();
        assert_eq!(sum(Dtype::F32, &alone), want((((a + b) + c) + d) / 4.0), "as without groups");
        assert_ne!(sum(Dtype::F32, &alone), sum(Dtype::F32, &groups));
        let half = |x: f32| bf16::from_f32(x).to_f32();
        let rounded = half(((a + c) + half(b + d)) / 4.0);
        assert_eq!(sum(Dtype::Bf16, &groups), want(rounded), "the owner is in the first");
    }
}
