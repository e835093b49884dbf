use parity_graph::Op;

use super::super::trial::{Given, Numbers, Trial};

fn normalised(numbers: &mut Numbers, shape: [usize; 4]) -> Given {
    let mut values = numbers.many(shape.iter().product());
    for row in values.chunks_mut(shape[3]) {
        let norm = row.iter().map(|v| v * v).sum::<f64>().sqrt();
        row.iter_mut().for_each(|v| *v = f64::from((*v / norm) as f32));
    }
    Given::new(shape, values)
}

/// S 2, Hq 2, Hk 3, H 6, D 16; a gate per head or per key channel.
fn trial(per_channel: bool, t: usize, blocks: usize) -> Trial {
    let mut numbers = Numbers::new(3);
    let (s, h, d) = (2, 6, 16);
    let gates = if per_channel { d } else { 1 };
    let gate = (0..s * t * h * gates).map(|_| -f64::from((0.3 * numbers.unit()) as f32)).collect();
    let beta = (0..s * t * h).map(|_| f64::from(numbers.unit() as f32)).collect();
    let given = vec![
        Some(normalised(&mut numbers, [s, t, 2, d]).laid_out([0, 2, 1, 3])),
        Some(normalised(&mut numbers, [s, t, 3, d])),
        Some(Given::random(&mut numbers, [s, t, h, d]).laid_out([0, 1, 2, 3])),
        Some(Given::new([s, t, h, gates], gate)),
        Some(Given::new([s, t, h, 1], beta)),
        Some(Given::random(&mut numbers, [s, h, d, d])),
    ];
    let mut trial = Trial::new(Op::GatedDeltaNet, given, [1, 1, s * t + blocks * d * s, h * d]);
    trial.params.set_int(0, blocks as i32);
    trial
}

/// As ggml's kernel, in f32 step by step.
fn kernel(trial: &Trial) -> Vec<f64> {
    let values: Vec<Vec<f32>> = trial
        .given
        .iter()
        .map(|given| given.as_ref().unwrap().to_vec().into_iter().map(|v| v as f32).collect())
        .collect();
    let [s, t, h, d] = trial.given[2].as_ref().unwrap().shape();
    let gates = trial.given[3].as_ref().unwrap().shape()[3];
    let blocks = trial.params.int(0) as usize;
    let mut out = vec![0f32; trial.shape.iter().product()];
    for (is, ih) in (0..s).flat_map(|is| (0..h).map(move |ih| (is, ih))) {
        let size = d * d;
        let mut state = values[5][(is * h + ih) * size..][..size].to_vec();
        for it in 0..t {
            let at = (is * t + it) * h + ih;
            let q = &values[0][((is * t + it) * 2 + ih % 2) * d..][..d];
            let k = &values[1][((is * t + it) * 3 + ih % 3) * d..][..d];
            for j in 0..d {
                let row = &mut state[j * d..(j + 1) * d];
                for (i, m) in row.iter_mut().enumerate() {
                    *m *= values[3][at * gates + i % gates].exp();
                }
                let dot = row.iter().zip(k).fold(0f32, |dot, (m, k)| m.mul_add(*k, dot));
                let delta = (values[2][at * d + j] - dot) * values[4][at];
                row.iter_mut().zip(k).for_each(|(m, k)| *m = k.mul_add(delta, *m));
                let o = row.iter().zip(q).fold(0f32, |o, (m, q)| m.mul_add(*q, o));
                out[at * d + j] = o * (1.0 / (d as f32).sqrt());
            }
            let block = t - 1 - it;
            if block < blocks {
                let at = s * t * h * d + ((block * s + is) * h + ih) * size;
                out[at..at + size].copy_from_slice(&state);
            }
        }
    }
    out.into_iter().map(f64::from).collect()
}

#[test]
fn the_kernel_is_explained() {
    for (per_channel, tokens, blocks) in [(false, 3, 1), (true, 3, 2), (false, 300, 1)] {
        let mut own = trial(per_channel, tokens, blocks);
        let recorded = kernel(&own);
        let excess = own.excess(&recorded);
        assert!(excess <= 1.0, "{excess}");
        own.assert_single_within_bound();
        let exact = own.double();
        assert!(own.bound(&exact).iter().all(|b| *b < 3e-5), "it does not grow with the tokens");
        // A gate that is a little off.
        let gate: Vec<f64> = own.given[3].as_ref().unwrap().to_vec().iter().map(|g| g * 1.001).collect();
        own.given[3] = Some(own.given[3].as_ref().unwrap().with(&gate));
        assert!(own.excess(&recorded) > 5.0);
    }
}

#[test]
fn errors_are_carried() {
    for per_channel in [false, true] {
        let own = trial(per_channel, 4, 2);
        for slot in 0..6 {
            own.assert_carries(slot, 1e-4, 60.0);
        }
    }
}
