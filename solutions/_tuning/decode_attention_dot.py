@triton.jit(do_not_specialize=["S"])
def decode_attention_dot_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    context_lens_ptr,
    o_ptr,
    scale,
    S,
    H_KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (h, b) does what rung 2's does on tensor cores: heads are rows of q, padded to 16."""
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(context_lens_ptr + b), S)
    offs_g, offs_s, offs_d = tl.arange(0, ROWS), tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    mask_d = (offs_d < D)[None, :]
    mask_q = (offs_g < G)[:, None] & mask_d
    offs_q = ((b * H_KV + h) * G + offs_g)[:, None] * D + offs_d[None, :]
    q = tl.load(q_ptr + offs_q, mask=mask_q, other=0.0)
    m_i = tl.full((ROWS,), LOWEST, tl.float32)
    l_i = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(0, length, TILE):
        inside = start + offs_s < length
        offs = ((b * S + start + offs_s[:, None]) * H_KV + h) * D + offs_d[None, :]
        k = tl.load(k_ptr + offs, mask=inside[:, None] & mask_d, other=0.0)
        v = tl.load(v_ptr + offs, mask=inside[:, None] & mask_d, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [ROWS, TILE]
        s = tl.where(inside[None, :], s, -float("inf"))
        m = tl.maximum(m_i, tl.max(s, axis=1))
        alpha = tl.exp2(m_i - m)
        p = tl.exp2(s - m[:, None])
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m
    o = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
    tl.store(o_ptr + offs_q, o, mask=mask_q)


def decode_attention_dot(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor) -> Tensor:
    """Both products on tensor cores, which want 16 rows; D from 16."""
    B, H, H_kv, S, D = check_args(q, k, v, context_lens, None, False)
    lab.check_contiguous(q=q, k=k, v=v, context_lens=context_lens)
    if D < 16:
        raise ValueError(f"{D=} must be at least 16, as tl.dot wants")
    o = torch.empty((B, H, D), dtype=q.dtype, device=q.device)
    if o.numel() > 0:
        decode_attention_dot_kernel[(H_kv, B)](
            q,
            k,
            v,
            context_lens,
            o,
            D**-0.5 * LOG2_E,
            S,
            H_KV=H_kv,
            G=H // H_kv,
            D=D,
            BLOCK_D=triton.next_power_of_2(D),
            ROWS=16,
            TILE=TILE,
            num_warps=4,
            num_stages=3,
        )
    return o


