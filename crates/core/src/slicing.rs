//! How large slices are and how many lanes carry them, from the line rate and the number of ranks.

/// The largest slice that is chosen, and the size of all slices whose place shows in the bits of a result.
///
/// Sums over a ring or a butterfly are made in an order that depends on where a slice begins, and with a wire type the owner
/// rounds less than the others. What is measured must not decide about bits, so those slices are of this size whatever
/// the line rate is.
pub const SLICE_BYTES: usize = 512 << 10;
/// The smallest slice that is chosen: what a frame costs by itself is some hundredths of it.
const SLICE_BYTES_LEAST: usize = 64 << 10;
/// How long a slice may occupy the link, in seconds: an urgent one waits for as long (P3, section 4.2).
///
/// To a server all workers send at once, and a slice of each takes as many times that. Whatever is under way when a more urgent
/// layer comes stays unanswered until the workers return to it, and the server's answers follow its pushes by so much: ResNet-50
/// over 2 servers, 4 workers and 1 Gbit/s takes 1.10 of T* with slices of 512 KiB, 1.08 with 256, 1.06 to 1.07 with 128 and less.
const SLICE_S: f64 = 4e-3;
/// What one lane moves and sums, in bytes per second: links that are slower need no second one.
const LANE_BYTES_PER_S: f64 = 1e9;
/// As many slices fit into a window, so that ranks that are out of step do not wait for each other's first ones. ResNet-50
/// on 8 hosts at 600 Mbit/s takes 1.16 of T* with 6 of 512 KiB, 1.02 to 1.06 with 11 of 256 KiB, 1.01 with 23 of 128 KiB.
const SLICES_PER_WINDOW: u64 = 16;

/// How tensors are cut into slices, and over how many lanes those are dealt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slicing {
    /// Largest slice of the store, and longest frame of what is gathered, in bytes.
    pub store_bytes: usize,
    /// Largest slice of a collective, and of the store in a book with a wire type, in bytes.
    pub collective_bytes: usize,
    /// Lanes that carry slices.
    pub lanes: u32,
}

impl Slicing {
    /// One size for all slices.
    #[must_use]
    pub fn fixed(slice_bytes: usize, lanes: u32) -> Self {
        Self { store_bytes: slice_bytes, collective_bytes: slice_bytes, lanes }
    }

    /// What suits a link of `bytes_per_s` in each direction that the slices of `sharers` ranks cross at once, and windows of
    /// `window_bytes` to each peer. Sizes are powers of two, so that rates that differ a little give the same.
    ///
    /// ```
    /// use penstock_core::Slicing;
    /// let gigabit = Slicing::for_link(125e6, 8 << 20, 1);
    /// assert_eq!((gigabit.store_bytes, gigabit.lanes), (512 << 10, 1));
    /// let of_a_server_with_4_workers = Slicing::for_link(125e6, 8 << 20, 4);
    /// assert_eq!(of_a_server_with_4_workers.store_bytes, 128 << 10);
    /// ```
    #[must_use]
    pub fn for_link(bytes_per_s: f64, window_bytes: u64, sharers: u32) -> Self {
        let by_rate = (bytes_per_s * SLICE_S / f64::from(sharers.max(1)))
            .clamp(SLICE_BYTES_LEAST as f64, SLICE_BYTES as f64);
        let nearest = 1 << by_rate.log2().round() as u32;
        let by_window = usize::try_from(window_bytes / SLICES_PER_WINDOW).unwrap_or(usize::MAX);
        let by_window = 1 << by_window.max(SLICE_BYTES_LEAST).ilog2();
        let lanes = (bytes_per_s / LANE_BYTES_PER_S).ceil().clamp(1.0, f64::from(crate::limits::LANES_MAX));
        Self { store_bytes: by_window.min(nearest), collective_bytes: SLICE_BYTES, lanes: lanes as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn slow_links_and_small_windows_make_slices_small() {
        let store =
            |mbit: f64, window_bytes| Slicing::for_link(mbit * 1e6 / 8.0, window_bytes, 1).store_bytes >> 10;
        let rates = [1.0, 100.0, 250.0, 600.0, 1e3, 1e4, 1e5];
        assert_eq!(rates.map(|mbit| store(mbit, 8 << 20)), [64, 64, 128, 256, 512, 512, 512]);
        let windows = [20 << 17, 20 << 16, 1 << 20, 1];
        assert_eq!(windows.map(|window_bytes| store(1e5, window_bytes)), [128, 64, 64, 64]);
        let of_a_server =
            |mbit: f64, workers| Slicing::for_link(mbit * 1e6 / 8.0, 8 << 20, workers).store_bytes >> 10;
        assert_eq!([1, 2, 4, 8, 64].map(|workers| of_a_server(1e3, workers)), [512, 256, 128, 64, 64]);
        assert_eq!([1e3, 1e4, 1e5].map(|mbit| of_a_server(mbit, 4)), [128, 512, 512]);
    }

    #[test]
    fn links_faster_than_a_lane_get_more_lanes() {
        let lanes =
            [1.0, 1e3, 8e3, 1e4, 1e5].map(|mbit| Slicing::for_link(mbit * 1e6 / 8.0, 1 << 20, 1).lanes);
        assert_eq!(lanes, [1, 1, 1, 2, 13]);
    }

    proptest! {
        #[test]
        fn whatever_is_measured_a_book_can_be_cut_so(bytes_per_s in 1e-300f64..1e300, window_bytes: u64, sharers: u32) {
            let Slicing { store_bytes, collective_bytes, lanes } = Slicing::for_link(bytes_per_s, window_bytes, sharers);
            prop_assert!((SLICE_BYTES_LEAST..=SLICE_BYTES).contains(&store_bytes) && store_bytes.is_power_of_two());
            prop_assert!(collective_bytes == SLICE_BYTES && (1..=crate::limits::LANES_MAX).contains(&lanes));
        }
    }
}
