#!/usr/bin/env bash
# A real torchrun of two nodes on one machine: two network namespaces, joined by a virtual link. Needs root on Linux.
#
#   sudo PYTHON=.venv/bin/python NPROC=2 tools/two_nodes.sh -m m1clip train photos --device cpu --out runs/photos
#
# Arguments are those of torchrun after --nnodes, --nproc-per-node and the rendezvous. TORCHRUN adds options of it.
# RATE=1gbit limits the speed of the link.
# The output of the second node goes to stderr. Ends with the exit code of the first node, or else of the second.
set -uo pipefail
PYTHON=${PYTHON:-python3}
id=m$$

remove() {
    jobs -p | xargs -r kill 2>/dev/null
    wait
    for node in 1 2; do
        ip netns del "$id-$node" 2>/dev/null
        rm -rf "/etc/netns/$id-$node"
    done
}
trap remove EXIT
trap 'exit 130' INT TERM

ip link add "$id-a" type veth peer name "$id-b" || exit 3
for node in 1 2; do
    side=$([[ $node == 1 ]] && echo a || echo b)
    ip netns add "$id-$node" && ip link set "$id-$side" netns "$id-$node" name eth0 || exit 3
    ip -n "$id-$node" addr add "10.77.0.$node/24" dev eth0
    ip -n "$id-$node" link set eth0 up
    ip -n "$id-$node" link set lo up
    if [[ ${RATE:-} ]]; then ip netns exec "$id-$node" tc qdisc add dev eth0 root tbf rate "$RATE" burst 512kb latency 100ms; fi
    mkdir -p "/etc/netns/$id-$node" # replaces files of /etc there
    echo 'hosts: files' >"/etc/netns/$id-$node/nsswitch.conf" # no name server can be reached
    printf '127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n' >"/etc/netns/$id-$node/hosts"
done

node() { # number, then the arguments of torchrun
    local number=$1
    shift
    # A host name of its own, so that messages name the node; gloo uses the link only.
    exec ip netns exec "$id-$number" unshare --uts sh -c 'hostname "$0" && exec "$@"' "node$number" \
        env GLOO_SOCKET_IFNAME=eth0 "$PYTHON" -m torch.distributed.run --nnodes 2 --nproc-per-node "${NPROC:-1}" \
        --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --local-addr "10.77.0.$number" ${TORCHRUN:-} "$@"
}

node 1 "$@" &
first=$!
node 2 "$@" >&2 &
second=$!
wait $first
code=$?
wait $second
other=$?
exit $((code ? code : other))
