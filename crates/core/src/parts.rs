//! Near-equal parts, and the logarithms of the number of ranks: what both steps and their costs count by.

/// Where the `index`-th of `parts` near-equal parts of `elems` elements begins; the first `elems % parts` parts have one
/// element more. The end is the next one's start.
#[must_use]
pub fn part_start(elems: u64, parts: u64, index: u64) -> u64 {
    let parts = parts.max(1);
    index * (elems / parts) + index.min(elems % parts)
}

/// The largest whole number whose power of two is at most `p`: the study's lg p, rounded down. 0 for no ranks.
#[must_use]
pub fn floor_log2(p: u32) -> u32 {
    p.checked_ilog2().unwrap_or(0)
}

/// The study's lg p, rounded up.
#[must_use]
pub fn ceil_log2(p: u32) -> u32 {
    floor_log2(p) + u32::from(p > 1 && !p.is_power_of_two())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_and_differ_by_one() {
        for (elems, parts) in [(0, 3), (1, 3), (10, 3), (12, 4), (7, 17)] {
            let lengths: Vec<u64> =
                (0..parts).map(|i| part_start(elems, parts, i + 1) - part_start(elems, parts, i)).collect();
            assert_eq!(lengths.iter().sum::<u64>(), elems);
            assert!(
                lengths.windows(2).all(|pair| pair[0] >= pair[1] && pair[0] - pair[1] <= 1),
                "{lengths:?}"
            );
        }
    }

    #[test]
    fn logarithms() {
        assert_eq!([0, 1, 2, 3, 4, 5, 8, 9, 16, 17].map(floor_log2), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]);
        assert_eq!([0, 1, 2, 3, 4, 5, 8, 9, 16, 17].map(ceil_log2), [0, 0, 1, 2, 2, 3, 3, 4, 4, 5]);
    }
}
