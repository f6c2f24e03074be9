-- Every decision about budgets, each as one step over all limits of a request. Called by budget.py through EVALSHA.
--
-- A window (requests or tokens per minute) is a hash of one-second buckets: field = Redis second, value = amount.
-- A bucket counts until its last possible event is 60 s old, so in no 60 s is more admitted than the limit.
-- Slots in flight are a sorted set: lease id, scored with its end in ms. Nobody renews a dead process's leases.
-- All keys carry the hash tag {poolgate}; all have a TTL. Redis >= 6.2 (effects replication: TIME before writes).

local WINDOW_S = 60
local TTL_S = WINDOW_S + 2
local SLOT_WAIT_MS = 1000  -- nobody knows when a slot comes free: ask again in a second

local clock = redis.call('TIME')
local second = tonumber(clock[1])
local now_ms = second * 1000 + math.floor(tonumber(clock[2]) / 1000)

local function integer(number)
  return string.format('%.0f', number)  -- tostring() would write 1e+15
end

-- {second, amount} of the buckets that still count, in no order; and their sum. Forgets the others, also those
-- that a clock which was set back has left in the future.
local function window(key)
  local flat = redis.call('HGETALL', key)
  local buckets, used = {}, 0
  for i = 1, #flat, 2 do
    local bucket, amount = tonumber(flat[i]), tonumber(flat[i + 1])
    if bucket < second - WINDOW_S or bucket > second + WINDOW_S then
      redis.call('HDEL', key, flat[i])
    elseif amount > 0 then
      buckets[#buckets + 1] = {bucket, amount}
      used = used + amount
    end
  end
  return buckets, used
end

local function leaves_ms(bucket)
  return (bucket + WINDOW_S + 1) * 1000 - now_ms
end

-- ms until `excess` has left the window
local function wait_ms(buckets, excess)
  table.sort(buckets, function(a, b) return a[1] < b[1] end)
  for _, bucket in ipairs(buckets) do
    excess = excess - bucket[2]
    if excess <= 0 then return leaves_ms(bucket[1]) end
  end
  return 0
end

local function reset_ms(buckets)
  local newest = 0
  for _, bucket in ipairs(buckets) do newest = math.max(newest, leaves_ms(bucket[1])) end
  return newest
end

local function charge(key, bucket, amount)
  redis.call('HINCRBY', key, integer(bucket), integer(amount))
  redis.call('EXPIRE', key, TTL_S)
end

local function hold(key, lease, lease_ms)
  redis.call('ZADD', key, integer(now_ms + lease_ms), lease)
  redis.call('PEXPIRE', key, integer(lease_ms + 1000))
end

-- KEYS: one per limit. ARGV: reserve, tokens, lease id, lease ms, then per limit: kind, limit.
-- Reply: admitted (1, 0), second, then per limit: used (after the charge), ms to wait (-1: never passes), ms to reset.
local function reserve()
  local tokens, lease, lease_ms = tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
  local admitted, reply, asks = 1, {}, {}
  for i, key in ipairs(KEYS) do
    local kind, limit = ARGV[3 + 2 * i], tonumber(ARGV[4 + 2 * i])
    local ask, used, wait, reset = 1, 0, 0, 0
    if kind == 'in_flight' then
      redis.call('ZREMRANGEBYSCORE', key, '-inf', integer(now_ms))
      used = redis.call('ZCARD', key)
      if used + 1 > limit then wait = SLOT_WAIT_MS end
    else
      if kind == 'tokens_per_min' then ask = tokens end
      local buckets
      buckets, used = window(key)
      reset = reset_ms(buckets)
      if ask > limit then
        wait = -1
      elseif used + ask > limit then
        wait = wait_ms(buckets, used + ask - limit)
      end
    end
    if wait ~= 0 then admitted = 0 end
    asks[i] = ask
    reply[i] = {used, wait, reset}
  end
  local flat = {admitted, second}
  for i, key in ipairs(KEYS) do
    local used, wait, reset = reply[i][1], reply[i][2], reply[i][3]
    if admitted == 1 then
      used = used + asks[i]
      if ARGV[3 + 2 * i] == 'in_flight' then
        hold(key, lease, lease_ms)
      elseif asks[i] > 0 then
        charge(key, second, asks[i])
        reset = leaves_ms(second)
      end
    end
    flat[#flat + 1] = used
    flat[#flat + 1] = wait
    flat[#flat + 1] = reset
  end
  return flat
end

-- KEYS: marker of this lease, then the in-flight keys, then the token keys.
-- ARGV: settle, lease id, bucket (the second of the charge), delta (used - reserved), number of in-flight keys.
-- Safe to send again: a slot is given back once, and the marker lets the tokens be corrected once.
local function settle()
  local lease, bucket, delta, slots = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
  for i = 2, 1 + slots do redis.call('ZREM', KEYS[i], lease) end
  if delta == 0 or bucket < second - WINDOW_S then return 0 end  -- what has left its window is no longer counted
  if not redis.call('SET', KEYS[1], '1', 'NX', 'EX', TTL_S) then return 0 end
  for i = 2 + slots, #KEYS do
    local key = KEYS[i]
    local charged = tonumber(redis.call('HGET', key, integer(bucket)) or '0')
    if delta > 0 then
      charge(key, bucket, delta)
    elseif charged > 0 then
      charge(key, bucket, math.max(delta, -charged))
    end
  end
  return 1
end

-- KEYS: one in-flight key. ARGV: renew, lease ms, lease ids. A lease that lapsed (Redis was away) is taken again.
local function renew()
  for i = 3, #ARGV do hold(KEYS[1], ARGV[i], tonumber(ARGV[2])) end
  return #ARGV - 2
end

-- KEYS: the set of gateway processes. ARGV: beat, process id, ms that it counts as alive. Reply: how many are alive.
local function beat()
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', integer(now_ms))
  hold(KEYS[1], ARGV[2], tonumber(ARGV[3]))
  return redis.call('ZCARD', KEYS[1])
end

local operations = {reserve = reserve, settle = settle, renew = renew, beat = beat}
return operations[ARGV[1]]()
