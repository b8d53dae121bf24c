#!/bin/bash
# Makes a certificate authority and certificates of nodes and clients, for tests and as a start for a cluster.
#   test-ca.sh DIR ca NAME [DAYS]                  DIR/NAME.pem and DIR/NAME.key: an authority
#   test-ca.sh DIR node CA NAME ADDRESS,... [DAYS]  the certificate of the node NAME (its node_name), which others reach
#                                                   at names and IP addresses, signed by CA
#   test-ca.sh DIR host CA FILE ADDRESS,... [DAYS]  the same for names and IP addresses alone: it proves no node's name
#   test-ca.sh DIR client CA NAME [DAYS]            a client's certificate, signed by CA
# A negative DAYS makes a certificate that has expired.
set -eu -o pipefail
umask 027
dir=$1 kind=$2
shift 2
mkdir -p "$dir"
cd "$dir"

key() { openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1.key"; }

# dates DAYS: begin and end of a certificate
dates() {
    local end=$(($(date +%s) + $1 * 86400)) begin=$(($(date +%s) - 3600))
    [ "$1" -ge 0 ] || begin=$((end - 86400))
    echo "$(date -u -d "@$begin" +%Y%m%d%H%M%SZ) $(date -u -d "@$end" +%Y%m%d%H%M%SZ)"
}

# sign CA NAME DAYS EXTENSIONS
sign() {
    local ca=$1 name=$2 begin end work
    read -r begin end < <(dates "$3")
    work=$(mktemp -d -p .)
    trap "rm -rf '$PWD/$work'" EXIT
    touch "$work/index"
    printf '[ca]\ndefault_ca = own\n[own]\ndatabase = %s/index\nnew_certs_dir = %s\nrand_serial = yes\ndefault_md = sha256\n' \
        "$work" "$work" >"$work/conf"
    printf 'policy = any\nunique_subject = no\n[any]\ncommonName = supplied\n[more]\n%s\n' "$4" >>"$work/conf"
    openssl req -new -key "$name.key" -subj "/CN=$name" -out "$work/request"
    local self=(-cert "$ca.pem" -keyfile "$ca.key")
    [ "$ca" != "$name" ] || self=(-selfsign -keyfile "$ca.key")
    openssl ca -batch -notext -config "$work/conf" "${self[@]}" -extensions more -startdate "$begin" -enddate "$end" \
        -in "$work/request" -out "$name.pem" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
}

case $kind in
ca)
    key "$1"
    sign "$1" "$1" "${2:-3650}" $'basicConstraints = critical,CA:TRUE,pathlen:0\nkeyUsage = critical,keyCertSign,cRLSign\nsubjectKeyIdentifier = hash'
    ;;
node | host)
    names=
    [ "$kind" = host ] || names=",DNS:$2"
    IFS=, read -ra addresses <<<"$3"
    for address in "${addresses[@]}"; do
        case $address in
        *:* | [0-9]*.[0-9]*.[0-9]*.[0-9]*) names+=",IP:$address" ;;
        *) names+=",DNS:$address" ;;
        esac
    done
    key "$2"
    sign "$1" "$2" "${4:-365}" $'basicConstraints = critical,CA:FALSE\nkeyUsage = critical,digitalSignature\nextendedKeyUsage = serverAuth,clientAuth\nsubjectAltName = '"${names#,}"
    ;;
client)
    key "$2"
    sign "$1" "$2" "${3:-90}" $'basicConstraints = critical,CA:FALSE\nkeyUsage = critical,digitalSignature\nextendedKeyUsage = clientAuth'
    ;;
*)
    sed -n '2,8s/^# //p' "$0" >&2
    exit 2
    ;;
esac
